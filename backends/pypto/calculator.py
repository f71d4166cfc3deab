"""PyPTO's calculator: the C++ library with which its interpreter computes in torch, built on this machine once.

PyPTO ships it as source, because it links against the torch that is there. The build takes about a minute and is kept
in the user's cache directory, one for each pair of versions.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

from kda.backends import disk

LIBRARY = "libtile_fwk_calculator.so"
JOBS = 2

VARIABLE = "XDG_CACHE_HOME"
"""Of the environment: the user's cache directory, in which the calculators have a folder."""


def folder() -> Path:
    """Where calculators are kept."""
    return disk.root(VARIABLE, "~/.cache") / "kda-ops"


def cache() -> disk.Cache:
    """The folder of the calculators, the variable that moves it, how many they are and their size in bytes."""
    return disk.measured(folder(), VARIABLE, f"*/{LIBRARY}")


def missing_tools() -> str | None:
    """Why it can be neither loaded nor built, or None."""
    if disk.whole(_path(folder())):
        return None
    tools = {"cmake (`pip install cmake`)": _cmake(), "make": _make(), "a C++ compiler": _compiler()}
    absent = " and ".join(name for name, path in tools.items() if path is None)
    return f"PyPTO's interpreter has to be built once, and PATH lacks {absent}" if absent else None


@functools.cache
def load() -> None:
    """Make the calculator's symbols known to PyPTO. Raises RuntimeError, with the compiler's words, if it cannot."""
    from pypto._utils import BuildOnlineManager

    library = _path(folder())
    if not disk.whole(library):
        library = _path(disk.writable(folder(), VARIABLE))
        with disk.locked(library):
            if not disk.whole(library):  # no other process has built it meanwhile
                _build(library)
    try:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise RuntimeError(f"{library} does not fit this machine, remove it: {error}") from error
    BuildOnlineManager().calculator_loaded = True


def _path(root: Path) -> Path:
    return root / f"pypto-{version('pypto')}-torch-{torch.__version__}-{platform.machine()}" / LIBRARY


def _cmake() -> str | None:
    return shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))


def _make() -> str | None:
    return os.environ.get("CMAKE_GENERATOR") or shutil.which("make") or shutil.which("gmake")


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")


def _build(library: Path) -> None:
    import pypto

    if (cmake := _cmake()) is None or _make() is None or _compiler() is None:
        raise RuntimeError(missing_tools())
    source = Path(pypto.__file__).parent / "lib" / "calculator"
    with tempfile.TemporaryDirectory() as scratch:
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "PY3_MOD_TORCH_VERSION": torch.__version__,
            "PY3_MOD_TORCH_ROOT_PATH": Path(torch.__file__).parent,
            "PY3_MOD_TORCH_C_GLIBCXX_USE_CXX11_ABI": int(torch.compiled_with_cxx11_abi()),
        }
        defined = [f"-D{name}={value}" for name, value in options.items()]
        _run([cmake, "-S", str(source), "-B", f"{scratch}/build", *defined])
        _run([cmake, "--build", f"{scratch}/build", "-j", str(JOBS)])
        _run([cmake, "--install", f"{scratch}/build", "--prefix", f"{scratch}/install"])
        disk.keep(library, Path(scratch, "install", "lib", LIBRARY).read_bytes())


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"PyPTO's calculator could not be built: {' '.join(command)}\n{done.stdout}{done.stderr}")
