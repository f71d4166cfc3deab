"""Compiled kernels on disk, beside TileLang's own cache: a later process runs one without importing TileLang.

That import takes seconds, and loading a kernel milliseconds. An entry is named after what it was built from: target,
parameters, TileLang's version, and the source of this folder and of the constants.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kda.golden import constants


class Entry:
    """The place of one compiled kernel."""

    def __init__(self, target: str, builder: str, parameters: dict[str, Any]) -> None:
        description = repr((target, builder, sorted(parameters.items()), _sources()))
        name = f"{builder.split('.')[-1]}-{hashlib.sha256(description.encode()).hexdigest()[:32]}.so"
        root = os.environ.get("TILELANG_CACHE_DIR") or os.path.expanduser("~/.tilelang/cache")
        self._path = Path(root, "kda", name)

    def load(self) -> Callable[..., None] | None:
        """The kernel's function; None if it was never kept here."""
        if not self._path.is_file():
            return None
        import tvm_ffi

        _load_runtime()
        return tvm_ffi.load_module(str(self._path))["main"]

    def keep(self, kernel: Any) -> None:
        """Keep a kernel that TileLang has just compiled; with its cache switched off there is no file to keep."""
        folder = getattr(kernel, "_tilelang_cache_path", None)
        if folder is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(f".{os.getpid()}")
        with unfinished.open("wb") as file:
            file.write(Path(folder, "executable.so").read_bytes())
            os.fsync(file.fileno())
        unfinished.replace(self._path)  # at once and after the data, so that no process ever sees half a file


@functools.cache
def _sources() -> str:
    """What stands for the code that builds kernels."""
    digest = hashlib.sha256(importlib.metadata.version("tilelang").encode())
    for file in (*sorted(Path(__file__).parent.rglob("*.py")), Path(constants.__file__)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.cache
def _load_runtime() -> ctypes.CDLL:
    """TileLang's runtime, whose functions a kernel calls, without its Python package."""
    package = importlib.util.find_spec("tilelang")
    return ctypes.CDLL(str(Path(package.origin).with_name("lib") / "libtilelang.so"), mode=ctypes.RTLD_GLOBAL)
