"""What the TileLang backend finds missing on a machine, before a call fails for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kda
from kda import backends
from kda.backends import tilelang as tilelang_backend
from kda.backends.tilelang import build, detect
from kda.golden import inputs


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with a GPU, TileLang and an empty cache, but without any compiler; the folder is on its PATH."""
    for variable in ("KDA_EMULATE", "CXX", "CC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    real = os.access
    monkeypatch.setattr(detect.os, "access", lambda path, mode: "/usr/local/cuda" not in path and real(path, mode))
    monkeypatch.setattr(detect, "files", absent)
    monkeypatch.setattr(detect, "has_cuda", lambda: True)
    monkeypatch.setattr(detect, "_missing_distribution", lambda: None)
    return tmp_path


def absent(name: str) -> Any:
    raise detect.PackageNotFoundError(name)


def tool(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o755)
    return path


NO_NVCC = "there is no nvcc (the extra `cuda` brings one; or install the CUDA toolkit, or set CUDA_HOME)"
NO_CXX = "there is no C++ compiler on PATH (install g++, or set CXX)"


def test_a_gpu_without_compilers(machine: Path) -> None:
    assert backends.unusable("tilelang") == [f"{NO_CXX}; {NO_NVCC}"]
    tool(machine / "g++")
    assert backends.unusable("tilelang") == [NO_NVCC]
    tool(machine / "nvcc")
    assert backends.unusable("tilelang") == []


def test_the_kernels_of_an_earlier_process_need_none(machine: Path) -> None:
    (machine / "cache" / "kda").mkdir(parents=True)
    (machine / "cache" / "kda" / "plan.so").touch()
    assert backends.unusable("tilelang") == []


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_toolkit_by_name(machine: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    tool(machine / "g++")
    monkeypatch.setenv(variable, str(machine / "cuda"))
    expected = f"{variable} is '{machine}/cuda', where there is no bin/nvcc"
    assert backends.unusable("tilelang") == [expected]
    tool(machine / "nvcc")  # TileLang takes the toolkit by name, and no other
    assert backends.unusable("tilelang") == [expected]
    tool(machine / "cuda" / "bin" / "nvcc")
    assert backends.unusable("tilelang") == []


def test_the_nvcc_of_a_python_package(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(machine / "g++")
    monkeypatch.setattr(detect, "files", lambda name: [Path("nvidia/cu13/bin/nvcc")])
    assert backends.unusable("tilelang") == []


def test_on_the_cpu_it_takes_a_cpp_compiler(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "has_cuda", lambda: False)
    assert ["there is no CUDA device" in reason for reason in backends.unusable("tilelang")] == [True]
    monkeypatch.setenv("KDA_EMULATE", "1")
    assert backends.status()["tilelang"] == [NO_CXX]
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert backends.status()["tilelang"] == ["CXX is 'no-such-compiler', which is no command on PATH"]
    tool(machine / "no-such-compiler")
    assert backends.status()["tilelang"] == []


def test_auto_falls_back_with_the_reason(register: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    register("tilelang", tilelang_backend, device_type="cpu")
    monkeypatch.setenv("KDA_EMULATE", "1")
    with pytest.warns(RuntimeWarning, match=f"tilelang cannot take .*{re.escape(NO_CXX)}.*; using torch instead"):
        o, _ = kda.chunk_kda(**inputs.stable(1, 7, 1, 64))
    assert o.shape == (1, 7, 1, 64)
    with pytest.raises(NotImplementedError, match=re.escape(NO_CXX)):
        kda.chunk_kda(**inputs.stable(1, 7, 1, 64), backend="tilelang")


def test_a_call_on_a_gpu_needs_them_only_for_kernels_that_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU and some kernels, but no nvcc."""
    cuda = SimpleNamespace(type="cuda")
    call = SimpleNamespace(K=64, V=64, B=1, T=8, q=SimpleNamespace(dtype=torch.bfloat16, device=cuda))
    kept = {"plan": True, "carry": True}
    specs = [SimpleNamespace(kept=lambda name=name: SimpleNamespace(exists=lambda: kept[name])) for name in kept]
    monkeypatch.setattr(tilelang_backend, "target_for", lambda device: tilelang_backend.HOPPER)
    monkeypatch.setattr(tilelang_backend, "wanted", lambda call: specs)
    monkeypatch.setattr(tilelang_backend, "import_failure", lambda: None)
    assert tilelang_backend.refuses(call) == []
    kept["carry"] = False
    assert tilelang_backend.refuses(call) == [f"{NO_CXX}; {NO_NVCC}"]


def test_a_compiler_that_is_missing_only_then_is_named_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tilelang", reason="its version is looked up")

    def fails(*_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "nvcc")

    monkeypatch.setattr(build, "import_failure", lambda: None)
    monkeypatch.setattr(build, "make", fails)
    with pytest.raises(RuntimeError, match=f"plan cannot be compiled for sm_90a: {re.escape(f'{NO_CXX}; {NO_NVCC}')}"):
        build.build("sm_90a", "kda.backends.tilelang.kernels.plan.plan", HV=3)


# ---- TileLang itself


@pytest.fixture
def undetected(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.undo()
    detect._missing_distribution.cache_clear()
    yield
    detect._missing_distribution.cache_clear()


def test_a_folder_of_that_name_is_not_tilelang(undetected: None, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ModuleSpec("tilelang", None, is_package=True)
    folder.submodule_search_locations = ["/somewhere/tilelang"]
    monkeypatch.setattr(detect.importlib.util, "find_spec", lambda name: folder)
    monkeypatch.setattr(detect, "version", absent)
    assert backends.unusable("tilelang")[0] == "tilelang is not installed (the extra `cuda`)"
    detect._missing_distribution.cache_clear()
    monkeypatch.setattr(detect, "version", lambda name: "0.1.15")
    assert "Python finds it as a folder, ['/somewhere/tilelang']" in backends.unusable("tilelang")[0]


BROKEN = """
import warnings, torch, kda
from kda import backends
from kda.backends import tilelang
from kda.golden import inputs
assert backends.status()["tilelang"] == [], "only an import can tell"
backends.register("tilelang", tilelang, device_type="cpu")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    o, _ = kda.chunk_kda(**inputs.stable(1, 7, 1, 64))
assert any("libz3.so is missing); using torch instead" in str(w.message) for w in caught), caught
(reason,) = backends.status()["tilelang"]
assert reason == "tilelang cannot be imported: ImportError: libz3.so is missing", reason
from kda.backends.tilelang.build import build
try:
    build("c", "kda.backends.tilelang.kernels.plan.plan", HV=2)
except RuntimeError as error:
    assert reason in str(error), error
"""


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
@pytest.mark.usefixtures("undetected")
def test_an_import_that_fails_is_a_reason_from_then_on(tmp_path: Path) -> None:
    pytest.importorskip("tilelang", reason="its version is looked up")
    (tmp_path / "tilelang").mkdir()
    (tmp_path / "tilelang" / "__init__.py").write_text("raise ImportError('libz3.so is missing')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "KDA_EMULATE": "1"}
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
