"""PyPTO's calculator: the C++ library with which its interpreter computes in torch, built on this machine once.

PyPTO ships it as source, because it links against the torch that is there. The build takes about a minute and is kept
in the user's cache directory, one for each pair of versions.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

LIBRARY = "libtile_fwk_calculator.so"
JOBS = 2


def missing_tools() -> str | None:
    """Why it can be neither loaded nor built, or None."""
    if _built().exists():
        return None
    tools = {"cmake (`pip install cmake`)": _cmake(), "a C++ compiler": _compiler()}
    absent = " and ".join(name for name, path in tools.items() if path is None)
    return f"PyPTO's interpreter has to be built once, and PATH lacks {absent}" if absent else None


@functools.cache
def load() -> None:
    """Make the calculator's symbols known to PyPTO. Raises RuntimeError, with the compiler's words, if it cannot."""
    from pypto._utils import BuildOnlineManager

    library = _built()
    if not library.exists():
        _build(library)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    BuildOnlineManager().calculator_loaded = True


def _built() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "kda-ops" / f"pypto-{version('pypto')}-torch-{torch.__version__}" / LIBRARY


def _cmake() -> str | None:
    return shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")


def _build(library: Path) -> None:
    import pypto

    if (cmake := _cmake()) is None or _compiler() is None:
        raise RuntimeError(missing_tools())
    source = Path(pypto.__file__).parent / "lib" / "calculator"
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "PY3_MOD_TORCH_VERSION": torch.__version__,
            "PY3_MOD_TORCH_ROOT_PATH": Path(torch.__file__).parent,
            "PY3_MOD_TORCH_C_GLIBCXX_USE_CXX11_ABI": int(torch.compiled_with_cxx11_abi()),
        }
        defined = [f"-D{name}={value}" for name, value in options.items()]
        _run([cmake, "-S", str(source), "-B", f"{folder}/build", *defined])
        _run([cmake, "--build", f"{folder}/build", "-j", str(JOBS)])
        _run([cmake, "--install", f"{folder}/build", "--prefix", f"{folder}/install"])
        os.replace(f"{folder}/install/lib/{LIBRARY}", library)  # at once: another process may be looking


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"PyPTO's calculator could not be built: {' '.join(command)}\n{done.stdout}{done.stderr}")
