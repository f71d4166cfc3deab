"""The package as others get it: the editable install that the suite runs on, and a wheel in a clean environment."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import kda

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"kda": "kda", "backends": "kda/backends", "golden": "kda/golden"}

CALL = """
import torch, kda
from kda import golden
inputs = golden.inputs.raw(1, 70, 2, 16, 32, 4, lengths=[5, 0, 65], dtype=torch.float32, initial_state=True)
(o, state), (expected_o, expected_state) = kda.chunk_kda(**inputs), golden.recurrent_kda_golden(**inputs)
assert golden.rel_rmse(o, expected_o) < 1e-4 and golden.rel_rmse(state, expected_state) < 1e-4
print(kda.__file__)
"""


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_suite_runs_on_an_editable_install() -> None:
    # The build leaves metadata in ROOT as well, which is on sys.path here; only what pip installed has an origin.
    origins = [d.read_text("direct_url.json") for d in importlib.metadata.distributions(name="kda-ops")]
    (origin,) = (json.loads(text) for text in origins if text)
    assert origin["dir_info"]["editable"] and origin["url"] == ROOT.as_uri()
    assert Path(kda.__file__) == ROOT / "kda" / "__init__.py"
    assert Path(kda.golden.__file__) == ROOT / "golden" / "__init__.py"
    assert importlib.metadata.version("kda-ops") == kda.__version__


def test_pyproject_lists_every_package() -> None:
    tomllib = pytest.importorskip("tomllib", reason="part of Python from 3.11")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        ".".join([target.replace("/", "."), *file.parent.relative_to(ROOT / folder).parts])
        for folder, target in FOLDERS.items()
        for file in (ROOT / folder).rglob("__init__.py")
    }
    assert sorted(settings["packages"]) == sorted(found)
    assert set(settings["package-dir"].values()) == set(FOLDERS)


def test_wheel_in_a_clean_environment(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, as setuptools would pack what an earlier build left in ROOT/build
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")

    expected = {
        f"{target}/{file.relative_to(source / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for file in (source / folder).rglob("*")
        if file.is_file()
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"kda_ops-{kda.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == expected
    assert {f"{info}METADATA", f"{info}RECORD"} <= names

    outside = tmp_path / "outside"
    outside.mkdir()
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=outside)
    python = tmp_path / "venv" / "bin" / "python"
    # The release that runs here, so that a copy on this machine serves; a local label such as +cpu is no release.
    torch_release = f"torch=={torch.__version__.split('+')[0]}"
    run(python, "-m", "pip", "install", "-q", "--no-compile", torch_release, wheel, cwd=outside)
    place = run(python, "-c", CALL, cwd=outside).strip()
    assert Path(place).is_relative_to(tmp_path / "venv")
    assert "torch" in run(python.with_name("kda"), "info", cwd=outside)
