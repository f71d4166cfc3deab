"""Whether this machine has what the kernels need: TileLang, compilers, and a CUDA device or the wish to do without one.

TileLang is not imported to find out, which takes seconds, except by `import_failure`, before a kernel has to be built.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, files, version

import torch

from kda.backends.environment import emulating

from .kept import make_writable

_failed_import: str | None = None


def missing_tilelang() -> str | None:
    """Why there is no TileLang, or None; what an import has told is remembered."""
    return _missing_distribution() or _failed_import


@functools.cache
def _missing_distribution() -> str | None:
    try:
        version("tilelang")
    except PackageNotFoundError:  # a folder of that name on the path is not TileLang
        return "tilelang is not installed (the extra `cuda`)"
    spec = importlib.util.find_spec("tilelang")
    if spec is None or spec.origin is None:
        where = "nowhere" if spec is None else f"as a folder, {list(spec.submodule_search_locations or ())}"
        return f"tilelang is installed, but Python finds it {where}"
    return None


def import_failure() -> str | None:
    """Why TileLang cannot be imported, or None. This imports it, and sees to the folder that it writes to."""
    global _failed_import
    if _failed_import is None and "tilelang.language" not in sys.modules:
        make_writable()  # or the import fails
        try:
            importlib.import_module("tilelang.language")
        except Exception as error:
            _failed_import = f"tilelang cannot be imported: {type(error).__name__}: {error}"
    return _failed_import


def missing_device() -> str | None:
    """Why neither a GPU nor, where they may, CPU tensors can be computed on; or None. Compilers are not looked for."""
    if emulating() or has_cuda():
        return None
    return "there is no CUDA device (KDA_EMULATE=1 runs the kernels on CPU tensors, slowly)"


@functools.cache
def has_cuda() -> bool:
    """Does torch see a CUDA device?"""
    return torch.cuda.is_available()


def missing_compilers(*, nvcc: bool) -> str | None:
    """Why no kernel can be compiled for the CPU, or with `nvcc` for a GPU; or None. TileLang looks in these places."""
    reasons = [_missing_cxx(), _missing_nvcc() if nvcc else None]
    return "; ".join(reason for reason in reasons if reason) or None


def _missing_cxx() -> str | None:
    for variable in ("CXX", "CC"):
        if command := os.environ.get(variable):
            return None if shutil.which(command) else f"{variable} is {command!r}, which is no command on PATH"
    if any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return None
    return "there is no C++ compiler on PATH (install g++, or set CXX)"


def _missing_nvcc() -> str | None:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            found = os.access(os.path.join(home, "bin", "nvcc"), os.X_OK)
            return None if found else f"{variable} is {home!r}, where there is no bin/nvcc"
    if shutil.which("nvcc") or os.access("/usr/local/cuda/bin/nvcc", os.X_OK):
        return None
    try:
        if any(file.name == "nvcc" for file in files("nvidia-cuda-nvcc") or ()):
            return None
    except PackageNotFoundError:
        pass
    return "there is no nvcc (the extra `cuda` brings one; or install the CUDA toolkit, or set CUDA_HOME)"
