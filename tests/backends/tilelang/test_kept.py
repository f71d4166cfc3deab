"""Kernels kept on disk: what one is named after, and that a later process runs it without importing TileLang."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tilelang")

from kda.backends.tilelang import kept
from kda.backends.tilelang.kept import Kept

PACKAGE = Path(kept.__file__).parents[2]
KERNELS = "kda.backends.tilelang.kernels"
HOSTS = ("chunk.py", "recurrent.py", "host.py", "build.py", "kept.py", "detect.py", "cpu_trace.py", "__init__.py")


# ---- the sources that a key is made from, on a copy of the package where each file in turn is edited


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole package, to be edited. `kept` reads sources beside itself and imports none of them."""
    target = tmp_path_factory.mktemp("copy") / "kda"
    shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def source_hash(copy: Path, module: str) -> str:
    """What the copy's own `kept` says of a module of the copy, with nothing remembered."""
    spec = spec_from_file_location("kda.backends.tilelang.kept", copy / "backends" / "tilelang" / "kept.py")
    of_copy = module_from_spec(spec)
    spec.loader.exec_module(of_copy)
    return of_copy.source_hash(module)


def sources(copy: Path, module: str) -> set[str]:
    """The files that change the module's hash when they are edited."""
    before, found = source_hash(copy, module), set()
    for file in copy.rglob("*.py"):
        text = file.read_bytes()
        file.write_bytes(text + b"\n# edited\n")
        if source_hash(copy, module) != before:
            found.add(file.relative_to(copy).as_posix())
        file.write_bytes(text)
    assert source_hash(copy, module) == before
    return found


def under_kernels(*names: str) -> set[str]:
    return {f"backends/tilelang/kernels/{name}.py" for name in names}


TABLE, CONSTANTS = "backends/tilelang/chunk_table.py", "golden/constants.py"


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("plan", under_kernels("plan")),
        ("carry", under_kernels("carry", "plan", "state")),
        ("chunk_o", under_kernels("chunk_o", "plan")),
        ("prepare", under_kernels("prepare", "plan", "activation", "rows", "scores", "inverse", "wy")),
    ],
)
def test_a_kernels_key_is_made_of_its_module_and_what_that_imports(copy: Path, module: str, expected: set[str]) -> None:
    assert sources(copy, f"{KERNELS}.{module}") == {TABLE, CONSTANTS} | expected


@pytest.mark.parametrize("module", ["recurrent", "sm90.prepare"])
def test_no_host_no_ladder_and_no_other_kernel_is_in_a_key(copy: Path, module: str) -> None:
    found = sources(copy, f"{KERNELS}.{module}")
    assert f"backends/tilelang/kernels/{module.replace('.', '/')}.py" in found and CONSTANTS in found
    assert not found & {f"backends/tilelang/{name}" for name in HOSTS}
    assert not any(file.startswith(("ladder/", "backends/torch/", "backends/pypto/", "cli/")) for file in found)
    assert not found & under_kernels("carry", "chunk_o", "chunk_delta_h", "prepare")
    if module == "sm90.prepare":  # imports of imports count too
        assert under_kernels("sm90/scores_pivoted", "sm90/scores_bisected", "sm90/inverse", "plan") <= found


def test_a_kernel_of_the_ladder_has_a_key_like_any_other(copy: Path) -> None:
    found = sources(copy, "kda.ladder.kernels.level1")
    assert found == {"ladder/kernels/level1.py", "ladder/kernels/tiles.py", CONSTANTS}


def test_where_the_package_lies_is_in_no_key(copy: Path) -> None:
    for module in ("plan", "carry", "prepare", "recurrent", "sm90.prepare"):
        assert source_hash(copy, f"{KERNELS}.{module}") == kept.source_hash(f"{KERNELS}.{module}")


# ---- the files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where kernels are kept."""
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kda"


def compiled(tmp_path: Path, content: bytes = b"a library") -> SimpleNamespace:
    """What `keep` looks at in a kernel that TileLang has just compiled."""
    (tmp_path / "executable.so").write_bytes(content)
    return SimpleNamespace(_tilelang_cache_path=str(tmp_path))


WHAT: dict[str, Any] = {
    "builder": f"{KERNELS}.plan.plan", "parameters": {"HV": 2, "dtype": "bfloat16"}, "target": "sm_90a", "options": {}
}  # fmt: skip


def test_each_change_of_what_it_was_built_from_is_another_file(folder: Path, tmp_path: Path) -> None:
    changes = [
        {}, {"builder": f"{KERNELS}.carry.carry"}, {"parameters": {"HV": 4, "dtype": "bfloat16"}}, {"target": "c"},
        {"options": {"tl.enable_fast_math": True}},
    ]  # fmt: skip
    for count, change in enumerate(changes, 1):
        for _ in range(2):  # the same thing again is the same file
            Kept(**WHAT | change).keep(compiled(tmp_path))
            assert len(list(folder.iterdir())) == count
    reordered = dict(reversed(WHAT["parameters"].items()))
    Kept(**WHAT | {"parameters": reordered}).keep(compiled(tmp_path))
    assert len(list(folder.iterdir())) == len(changes)


def test_a_file_is_whole_or_not_there(folder: Path, tmp_path: Path) -> None:
    assert Kept(**WHAT).load() is None
    Kept(**WHAT).keep(SimpleNamespace(_tilelang_cache_path=None))  # TileLang's own cache is switched off
    assert not folder.exists()
    Kept(**WHAT).keep(compiled(tmp_path, b"one"))
    Kept(**WHAT).keep(compiled(tmp_path, b"two"))
    (file,) = folder.iterdir()
    assert file.name.startswith("plan-") and file.suffix == ".so" and file.read_bytes() == b"two"


LATER = """
import sys, torch
from kda.backends.tilelang.build import HOPPER, build
builder = "kda.backends.tilelang.kernels.plan.plan"
plan = build(HOPPER, builder, HV=2, V=64, dtype=torch.bfloat16, cu_dtype=torch.int32)
try:
    plan()
except RuntimeError as error:
    print("tilelang" in sys.modules, error)
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_later_process_runs_a_kernel_without_importing_tilelang(tmp_path: Path) -> None:
    def run() -> str:
        environment = os.environ | {"TILELANG_CACHE_DIR": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.splitlines()[-1]

    assert run().startswith("True kda_plan: num_args should be 4")
    assert run().startswith("False kda_plan: num_args should be 4")
