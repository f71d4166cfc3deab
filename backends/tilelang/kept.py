"""Compiled kernels on disk, beside TileLang's own cache: a later process runs one without importing TileLang.

That import takes seconds, and loading a kernel milliseconds. A kernel's file is named after all that it was built from:
TileLang's version, target, options, parameters, and the source of its module and of every module of this package that
it imports, directly or not. Whatever else is edited, the kernel stays.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PACKAGE = __name__.partition(".")[0]


class Kept:
    """The place of one compiled kernel."""

    def __init__(self, builder: str, parameters: dict[str, Any], target: str, options: dict[str, Any]) -> None:
        module, _, name = builder.rpartition(".")
        built_from = repr((builder, sorted(parameters.items()), target, options, _version(), source_hash(module)))
        file = f"{name}-{hashlib.sha256(built_from.encode()).hexdigest()[:32]}.so"
        root = os.environ.get("TILELANG_CACHE_DIR") or os.path.expanduser("~/.tilelang/cache")
        self._path = Path(root, "kda", file)

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
def source_hash(module: str) -> str:
    """Of the module's source and that of every module of this package that it imports, directly or not."""
    files: dict[str, bytes] = {}
    _collect(module, files)
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name] + b"\0")
    return digest.hexdigest()


def _collect(module: str, files: dict[str, bytes]) -> None:
    if module in files or (file := _file(module)) is None:
        return
    files[module] = file.read_bytes()
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for name in _imports(ast.parse(files[module]), package):
        _collect(name, files)


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Full names of the modules of this package that are imported; some of them may be names inside a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            if base.partition(".")[0] == PACKAGE:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _file(module: str) -> Path | None:
    """Where a module of this package stands; None for what is no module. Nothing is imported for it."""
    path = Path(__file__).parents[2].joinpath(*module.split(".")[1:])
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@functools.cache
def _version() -> str:
    return importlib.metadata.version("tilelang")


@functools.cache
def _load_runtime() -> ctypes.CDLL:
    """TileLang's runtime, whose functions a kernel calls, without its Python package."""
    package = importlib.util.find_spec("tilelang")
    assert package is not None and package.origin is not None, "a kernel was kept, so tilelang is installed"
    return ctypes.CDLL(str(Path(package.origin).with_name("lib") / "libtilelang.so"), mode=ctypes.RTLD_GLOBAL)
