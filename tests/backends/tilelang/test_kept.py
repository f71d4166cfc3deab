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
from kda.backends.tilelang.build import PASS_CONFIGS
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
        ("carry", under_kernels("carry", "plan", "segments", "state")),
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
    assert file.name.startswith("plan-") and file.suffix == ".so" and file.read_bytes().startswith(b"two")


def test_a_disk_that_is_full_is_a_warning(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept.disk, "keep", full)
    with pytest.warns(RuntimeWarning, match=f"could not be kept in {folder}: .*No space left"):
        Kept(**WHAT).keep(compiled(tmp_path))


def test_the_cache_is_counted(folder: Path, tmp_path: Path) -> None:
    assert kept.cache() == (folder, "TILELANG_CACHE_DIR", 0, 0)
    Kept(**WHAT).keep(compiled(tmp_path, bytes(1000)))
    _, _, files, size = kept.cache()
    assert files == 1 and 1000 < size < 1100


# ---- in processes


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


def later(cache: Path, code: str = LATER) -> str:
    """The last line that another process says."""
    environment = os.environ | {"TILELANG_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with one kernel."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    cache = tmp_path_factory.mktemp("filled")
    assert later(cache).startswith("True kda_plan: num_args should be 4")
    return cache


def test_a_later_process_runs_a_kernel_without_importing_tilelang(filled: Path) -> None:
    assert later(filled).startswith("False kda_plan: num_args should be 4")


@pytest.mark.parametrize("damage", ["cut short", pytest.param("garbled", marks=pytest.mark.slow)])
def test_a_broken_kernel_is_built_anew(filled: Path, tmp_path: Path, damage: str) -> None:
    """TileLang's copy of it is broken as well."""
    cache = shutil.copytree(filled, tmp_path / "cache")
    (own,) = cache.glob("kda/*.so")
    (tilelangs,) = cache.rglob("executable.so")
    whole = own.read_bytes()
    broken = whole[: len(whole) // 2] if damage == "cut short" else b"x" * len(whole)
    own.write_bytes(broken)
    tilelangs.write_bytes(broken)
    assert later(cache).startswith("True kda_plan: num_args should be 4")
    assert own.read_bytes()[: len(whole)] != broken
    assert later(cache).startswith("False kda_plan: num_args should be 4")


def test_a_kernel_is_read_from_a_cache_that_cannot_be_written(
    filled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(filled))
    monkeypatch.setattr(kept, "_unwritable", [])
    monkeypatch.setattr(kept.disk, "writable", lambda folder, variable: tmp_path)
    parameters = {"HV": 2, "V": 64, "dtype": "bfloat16", "cu_dtype": "int32"}
    plan = Kept(f"{KERNELS}.plan.plan", parameters, "sm_90a", PASS_CONFIGS)
    assert plan.exists()
    kept.make_writable()
    assert os.environ["TILELANG_CACHE_DIR"] == str(tmp_path) and kept.folder() == tmp_path / "kda"
    assert plan.exists() and plan.load() is not None


ONCE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from kda.backends.tilelang import build
compile_kernel = build.compile_kernel
def noting(kernel, target):
    with open(sys.argv[1], "a") as log:
        log.write("compiled\\n")
    return compile_kernel(kernel, target)
build.compile_kernel = noting
builder, options = "kda.backends.tilelang.kernels.plan.plan", {"HV": 2, "V": 128, "dtype": "bfloat16"}
with ThreadPoolExecutor(8) as pool:
    kernels = list(pool.map(lambda _: build.build("sm_90a", builder, cu_dtype="int32", **options), range(8)))
assert len(set(kernels)) == 1
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_eight_threads_of_two_processes_build_a_kernel_once(tmp_path: Path) -> None:
    environment = os.environ | {"TILELANG_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", ONCE, str(tmp_path / "log")]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors[-2000:]
    assert (tmp_path / "log").read_text() == "compiled\n"
    assert not list(tmp_path.rglob("kda/*.lock"))


HOMELESS = """
import os, warnings, torch, kda
from kda.golden import inputs
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    kda.chunk_kda(**inputs.stable(1, 9, 1, 64), backend="tilelang")
texts = [str(w.message) for w in caught if "cannot be written" in str(w.message)]
assert len(texts) == 1 and "/dev/null/.tilelang" in texts[0] and "TILELANG_CACHE_DIR" in texts[0], texts
print(os.environ["TILELANG_CACHE_DIR"])
"""


def test_where_nothing_can_be_kept_kernels_run_all_the_same() -> None:
    environment = {name: x for name, x in os.environ.items() if name != "TILELANG_CACHE_DIR"}
    environment |= {"HOME": "/dev/null", "KDA_EMULATE": "1"}
    done = subprocess.run([sys.executable, "-c", HOMELESS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not Path(done.stdout.strip()).exists(), "the temporary folder goes with its process"
