"""The package as others get it: a clone, a wheel, a source distribution, and what a type checker sees of it."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from environments import new_environment, pip_install, run

import kda

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"kda": "kda", "backends": "kda/backends", "golden": "kda/golden"}
DEPENDENCIES = ("numpy", "rich", "torch")
MODULES = ("kda_autoload.py",)  # beside the package
INFO = f"kda_ops-{kda.__version__}.dist-info/"

CALL = """
import torch, kda
from kda import golden
inputs = golden.inputs.raw(1, 70, 2, 16, 32, 4, lengths=[5, 0, 65], dtype=torch.float32, initial_state=True)
(o, state), (expected_o, expected_state) = kda.chunk_kda(**inputs), golden.recurrent_kda_golden(**inputs)
assert golden.rel_rmse(o, expected_o) < 1e-4 and golden.rel_rmse(state, expected_state) < 1e-4
print(kda.__file__)
"""


def clone(folder: Path) -> Path:
    """What a clone holds, links and all; without what earlier builds have left in ROOT."""
    target = folder / "clone"
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", *MODULES):
        shutil.copy(ROOT / name, target)
    return target


def expected_files() -> set[str]:
    """Where each file of the package lies once it is installed."""
    return {*MODULES} | {
        f"{target}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and not file.is_symlink() and "__pycache__" not in file.parts
    }


class Built(NamedTuple):
    sdist: Path
    wheel: Path  # built from the sdist


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--outdir", folder, clone(folder), cwd=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return Built(sdist, wheel)


def test_every_module_is_expected() -> None:
    files = expected_files()
    assert {"kda/py.typed", "kda/__init__.py", "kda/cli/demo.py", "kda/golden/stages.py"} <= files
    assert {"kda/backends/tilelang/kernels/sm90/prepare.py", "kda/backends/pypto/kernels/wy.py"} <= files


def test_the_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        links = [entry.filename for entry in wheel.infolist() if entry.external_attr >> 16 & 0o170000 == 0o120000]
    assert {name for name in names if not name.startswith(INFO)} == expected_files()
    assert {f"{INFO}METADATA", f"{INFO}RECORD"} <= names
    assert not links, "folders are real ones"


def test_the_source_distribution_holds_real_folders(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        members = {member.name.partition("/")[2]: member for member in sdist.getmembers()}
    assert expected_files() <= set(members)
    assert not [name for name, member in members.items() if member.issym() or member.islnk()]


def test_the_wheel_works_with_its_dependencies_alone(built: Built, tmp_path: Path) -> None:
    python = new_environment(tmp_path, *DEPENDENCIES)
    pip_install(python, built.wheel, cwd=tmp_path)
    place = Path(run(python, "-c", CALL, cwd=tmp_path).strip())
    assert place.is_relative_to(tmp_path / "venv")
    for name in ("backends", "golden"):
        assert (place.parent / name).is_dir() and not (place.parent / name).is_symlink()
        assert not (place.parents[1] / name).exists(), "nothing else lies beside the package"
    assert "torch" in run(python.with_name("kda"), "info", cwd=tmp_path)
    required = [
        re.match(r"[\w-]+", text)[0]
        for text in importlib.metadata.Distribution.at(next(place.parents[1].glob("kda_ops-*"))).requires
        if "extra ==" not in text
    ]
    assert sorted(required) == sorted(DEPENDENCIES)
    done = subprocess.run([python.with_name("kda"), "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), "a command starts without a word"


def test_a_clone_works_where_it_lies(tmp_path: Path) -> None:
    """With its dependencies installed and nothing else: neither the package nor a path to it."""
    python, here = new_environment(tmp_path, *DEPENDENCIES), clone(tmp_path)
    assert (here / "kda" / "backends").is_symlink() and (here / "kda" / "golden").is_symlink()
    shown = run(python, "-m", "kda", "info", cwd=here)
    assert f"kda {kda.__version__}" in re.sub(" +", " ", shown) and "tilelang is not installed" in shown
    assert Path(run(python, "-c", CALL, cwd=here).strip()) == here / "kda" / "__init__.py"


def test_a_plain_install_and_a_clone_do_not_disturb_each_other(tmp_path: Path) -> None:
    """The wheel is built straight from the clone here. Inside the clone the clone's own code runs."""
    python, here = new_environment(tmp_path, *DEPENDENCIES), clone(tmp_path)
    pip_install(python, ".", cwd=here)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    recorded = importlib.metadata.Distribution.at(site / INFO.strip("/")).files
    installed = {str(file) for file in recorded if file.suffix != ".pyc" and ".." not in file.parts}
    assert {name for name in installed if not name.startswith(INFO)} == expected_files()
    assert Path(run(python, "-c", CALL, cwd=tmp_path).strip()) == site / "kda" / "__init__.py"
    assert Path(run(python, "-c", CALL, cwd=here).strip()) == here / "kda" / "__init__.py"
    assert "torch" in run(python, "-m", "kda", "info", cwd=here)


def test_an_editable_install_follows_the_clone(tmp_path: Path) -> None:
    python, here = new_environment(tmp_path, *DEPENDENCIES), clone(tmp_path)
    pip_install(python, "--editable", here, cwd=tmp_path)
    assert Path(run(python, "-c", CALL, cwd=tmp_path).strip()) == here / "kda" / "__init__.py"
    with (here / "golden" / "constants.py").open("a") as file:
        file.write("\nEDITED = True\n")
    assert "True" in run(python, "-c", "from kda.golden import constants; print(constants.EDITED)", cwd=tmp_path)


def test_the_suite_runs_on_an_editable_install() -> None:
    # The build leaves metadata in ROOT as well, which is on sys.path here; only what pip installed has an origin.
    origins = [d.read_text("direct_url.json") for d in importlib.metadata.distributions(name="kda-ops")]
    (origin,) = (json.loads(text) for text in origins if text)
    assert origin["dir_info"]["editable"] and origin["url"] == ROOT.as_uri()
    assert Path(kda.__file__) == ROOT / "kda" / "__init__.py"
    assert Path(kda.golden.__file__).resolve() == ROOT / "golden" / "__init__.py"
    assert importlib.metadata.version("kda-ops") == kda.__version__


# ---- types

PROGRAM = """
import torch

import kda

x, beta = torch.zeros(1, 3, 2, 8), torch.zeros(1, 3, 2)
o, state = kda.chunk_kda(x, x, x, x, beta, scale=0.5, output_final_state=True, backend="torch")
assert state is not None
total: torch.Tensor = o.sum() + state.sum()
step, _ = kda.fused_recurrent_kda(x, x, x, x, beta, None, state, inplace_final_state=True)

kda.chunk_kda(x, x, x, x, beta, scale="no")  # expect: arg-type
kda.chunk_kda(x, x, x, x)  # expect: call-arg
kda.chunk_kda(x, x, x, x, beta, head_first=True)  # expect: call-arg
kda.chunk_kda(x, x, x, x, beta)[1].sum()  # expect: union-attr
number: float = kda.fused_recurrent_kda(x, x, x, x, beta)[0]  # expect: assignment
kda.fused_recurrent_kda(x, x, x, x, beta, ssm_state_indices=[1])  # expect: arg-type
"""


def test_a_type_checker_sees_what_a_user_does_wrong(built: Built, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    python = new_environment(tmp_path, *DEPENDENCIES)
    pip_install(python, built.wheel, cwd=tmp_path)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    expected = {
        number: line.partition("# expect: ")[2]
        for number, line in enumerate(PROGRAM.splitlines(), 1)
        if "# expect: " in line
    }
    command = (sys.executable, "-m", "mypy", "--python-executable", python, "--config-file=", "--strict", program)
    with pytest.raises(AssertionError) as failed:
        run(*command, cwd=tmp_path)
    shown = str(failed.value)
    found = {int(number): kind for number, kind in re.findall(r"program\.py:(\d+): error: .*\[([\w-]+)\]", shown)}
    assert found == expected, shown
    assert f"Found {len(expected)} errors in 1 file" in shown
