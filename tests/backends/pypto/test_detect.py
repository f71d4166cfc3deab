"""What the PyPTO backend finds on a machine, and that nothing it finds or misses is more than a reason."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kda
from kda import backends
from kda.backends.pypto import detect
from kda.golden import inputs

NPU = "no /dev/davinci*"

pytestmark = pytest.mark.usefixtures("undetected")


@pytest.fixture
def cann(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """CANN 9.0.0 is set up; the file in which it says so."""
    file = tmp_path / "aarch64-linux" / "ascend_toolkit_install.info"
    file.parent.mkdir()
    file.write_text("package_name=Ascend-cann-toolkit\nversion=9.0.0\ninnerversion=V100\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    return file


def test_without_a_device_node_torch_npu_is_not_even_looked_for(monkeypatch):
    monkeypatch.setattr(detect.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(detect.importlib.util, "find_spec", lambda name: pytest.fail(name))
    assert NPU in detect.missing_npu()


def test_a_device_without_torch_npu(monkeypatch):
    monkeypatch.setattr(detect.glob, "glob", lambda pattern: ["/dev/davinci0"])
    monkeypatch.setattr(detect.importlib.util, "find_spec", lambda name: None)
    assert detect.missing_npu() == "torch_npu is not installed (the extra `npu`)"


def test_cann_is_set_up_and_fits(monkeypatch, cann):
    monkeypatch.setattr(detect.glob, "glob", lambda pattern: ["/dev/davinci0"])
    monkeypatch.setattr(detect.importlib.util, "find_spec", lambda name: SimpleNamespace(origin="__init__.py"))
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace())
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: True), raising=False)
    for text, reason in (
        ("version=9.0.0", None), ("version=9.0.1.beta2", None), ("", None),
        ("version=9.1.0", "the kernels are for PyPTO 0.2 with CANN 9.0, got CANN 9.1.0"),
        ("version=8.5.0", "the kernels are for PyPTO 0.2 with CANN 9.0, got CANN 8.5.0"),
        ("version=9.05.0", "the kernels are for PyPTO 0.2 with CANN 9.0, got CANN 9.05.0"),
    ):  # fmt: skip
        cann.write_text(f"package_name=toolkit\n{text}\n")
        detect.missing_npu.cache_clear()
        assert detect.missing_npu() == reason
        assert backends.load("pypto").versions() == [("cann", text.removeprefix("version=") or "unknown")]
    monkeypatch.delenv("ASCEND_HOME_PATH")
    detect.missing_npu.cache_clear()
    assert detect.missing_npu() == "CANN is not set up: ASCEND_HOME_PATH is not set (source CANN's set_env.sh first)"
    assert backends.load("pypto").versions() == [("cann", "not set up")]


@pytest.mark.parametrize("emulate", ["0", "1"])
def test_another_pypto_is_refused_with_what_was_found(monkeypatch, cann, emulate):
    monkeypatch.setenv("KDA_EMULATE", emulate)
    monkeypatch.setattr(detect.importlib.util, "find_spec", lambda name: SimpleNamespace(origin="__init__.py"))
    monkeypatch.setattr(detect, "version", lambda name: "9.1.0")
    cann.write_text("version=9.1.0\n")
    assert backends.unusable("pypto")[0] == (
        "the kernels, and the way to PyPTO's interpreter, are for PyPTO 0.2 with CANN 9.0, got PyPTO 9.1.0 with CANN "
        "9.1.0"
    )


@pytest.mark.parametrize("error", [ImportError("libhccl.so"), OSError("libascendcl.so"), SystemExit(1)])
def test_a_broken_torch_npu_is_a_reason_and_no_exception(monkeypatch, cann, error):
    def failing(name: str, *args: object) -> object:
        if name == "torch_npu":
            raise error
        return real(name, *args)

    real = builtins.__import__
    monkeypatch.setattr(detect.glob, "glob", lambda pattern: ["/dev/davinci0"])
    monkeypatch.setattr(detect.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(builtins, "__import__", failing)
    assert detect.missing_npu() == f"torch_npu does not work: {type(error).__name__}: {error}"


@pytest.mark.parametrize("available", [True, False])
def test_torch_npu_has_the_last_word(monkeypatch, cann, available):
    monkeypatch.setattr(detect.glob, "glob", lambda pattern: ["/dev/davinci0"])
    monkeypatch.setattr(detect.importlib.util, "find_spec", lambda name: SimpleNamespace(origin="__init__.py"))
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace())
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: available), raising=False)
    assert backends.unusable("pypto") == ([] if available else [detect.missing_npu()])
    assert available or "torch.npu.is_available() is False" in detect.missing_npu()


def test_without_pypto_it_says_so(monkeypatch):
    def absent(name: str) -> str:
        raise detect.PackageNotFoundError(name)

    monkeypatch.setattr(detect, "version", absent)
    for emulate in ("0", "1"):
        monkeypatch.setenv("KDA_EMULATE", emulate)
        assert "pypto is not installed" in backends.unusable("pypto")[0]


def test_a_folder_of_that_name_is_not_pypto(monkeypatch):
    folder = ModuleSpec("pypto", None, is_package=True)
    folder.submodule_search_locations = ["/somewhere/pypto"]
    monkeypatch.setattr(detect.importlib.util, "find_spec", lambda name: folder)
    monkeypatch.setattr(detect, "version", lambda name: "0.2.0")
    assert "Python finds it as a folder, ['/somewhere/pypto']" in backends.unusable("pypto")[0]


BROKEN = """
import kda
from kda import backends
from kda.golden import inputs
assert backends.status()["pypto"] == [], "only an import can tell"
try:
    kda.chunk_kda(**inputs.stable(1, 7, 1, 64), backend="pypto")
except NotImplementedError as error:
    (reason,) = backends.status()["pypto"]
    assert reason in str(error)
    print(reason)
"""


def test_an_import_that_fails_is_a_reason_from_then_on(tmp_path):
    if reason := detect.missing_pypto() or detect.missing_interpreter():
        pytest.skip(reason)
    (tmp_path / "pypto").mkdir()
    (tmp_path / "pypto" / "__init__.py").write_text("raise ImportError('libc_sec.so is missing')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "KDA_EMULATE": "1"}
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "pypto cannot be imported: ImportError: libc_sec.so is missing", done.stderr[-2000:]


@pytest.mark.skipif(bool(detect.glob.glob("/dev/davinci[0-9]*")), reason="needs a machine without an NPU")
def test_without_an_npu_it_says_so_and_how_to_run_it_all_the_same():
    call = inputs.stable(1, 10, 1)
    assert any(NPU in reason and "KDA_EMULATE=1" in reason for reason in backends.status()["pypto"])
    with pytest.raises(NotImplementedError, match="there is no NPU"):
        kda.chunk_kda(**call, backend="pypto")
