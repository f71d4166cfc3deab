"""Compiled kernels on disk, beside TileLang's own cache: a later process runs one without importing TileLang.

That import takes seconds, and loading a kernel milliseconds. A kernel's file is named after all that it was built from:
TileLang's version, the machine, target, options, parameters, and the source of its module and of every module of this
package that it imports, directly or not. Whatever else is edited, the kernel stays.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kda.backends import disk

PACKAGE = __name__.partition(".")[0]

VARIABLE = "TILELANG_CACHE_DIR"
"""Of the environment: TileLang's cache, in which the kept kernels have a folder of their own."""

_unwritable: list[Path] = []  # what VARIABLE named before: what is kept there can be read all the same


def folder() -> Path:
    """Where kernels are kept."""
    return disk.root(VARIABLE, "~/.tilelang/cache") / "kda"


def cache() -> disk.Cache:
    """The folder of the kept kernels, the variable that moves it, how many they are and their size in bytes."""
    return disk.measured(folder(), VARIABLE)


def is_empty() -> bool:
    """Is no kernel kept?"""
    return next(folder().glob("*.so"), None) is None


def make_writable() -> None:
    """Before TileLang is imported or used: both caches move to a temporary folder if theirs cannot be written."""
    wanted = folder().parent
    usable = disk.writable(wanted, VARIABLE)
    if usable != wanted:
        _unwritable.append(wanted / "kda")
    if os.environ.get(VARIABLE, str(wanted)) != str(usable):
        os.environ[VARIABLE] = str(usable)  # TileLang reads it, and so do processes that this one starts


class Kept:
    """The place of one compiled kernel."""

    def __init__(self, builder: str, parameters: dict[str, Any], target: str, options: dict[str, Any]) -> None:
        module, _, name = builder.rpartition(".")
        built_from = (builder, sorted(parameters.items()), target, options, _version(), platform.machine())
        digest = hashlib.sha256(repr((*built_from, source_hash(module))).encode()).hexdigest()
        self._name = f"{name}-{digest[:32]}.so"

    def exists(self) -> bool:
        """Was it kept, and is it whole?"""
        return self._whole() is not None

    def load(self) -> Callable[..., None] | None:
        """The kernel's function; None if it is not kept, or is broken and has to be built anew."""
        if (path := self._whole()) is None:
            return None
        try:
            import tvm_ffi

            _load_runtime()
            return tvm_ffi.load_module(str(path))["main"]
        except Exception:  # of another machine, say; if TileLang is what is broken, building will tell
            return None

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Inside, no other thread or process builds this kernel."""
        return disk.locked(folder() / self._name)

    def keep(self, kernel: Any) -> None:
        """Keep a kernel that TileLang has just compiled; with its cache switched off there is no file to keep."""
        compiled = getattr(kernel, "_tilelang_cache_path", None)
        if compiled is None:
            return
        try:
            disk.keep(folder() / self._name, Path(compiled, "executable.so").read_bytes())
        except OSError as error:  # a full disk, say: the kernel is here and can be run
            warnings.warn(f"kda: a kernel could not be kept in {folder()}: {error}", RuntimeWarning, stacklevel=2)

    def _whole(self) -> Path | None:
        return next((f / self._name for f in (folder(), *_unwritable) if disk.whole(f / self._name)), None)


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
