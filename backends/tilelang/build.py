"""From a kernel's builder and its parameters to a function: one build per process and kind, kept on disk by `kept`.

Batch, lengths and the number of sequences are symbolic: one build serves them all.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from .detect import import_failure, missing_compilers, missing_tilelang
from .kept import Kept, make_writable

CPU = "c"
"""Target of the CPU execution path, which computes in float32."""

HOPPER = "sm_90a"
"""The one GPU architecture that the kernels are tuned and proved for; `kernels.sm90` is for it alone."""

PASS_CONFIGS = {"tl.enable_fast_math": True}
"""Of TileLang's compiler, for every kernel on a GPU; a kernel may ask for more."""

Kernel = Callable[..., None]


class Spec(NamedTuple):
    """One kernel, as `build` is asked for it."""

    target: str
    builder: str
    parameters: tuple[tuple[str, Any], ...]  # in the order of their names, dtypes by theirs

    def kept(self) -> Kept:
        """Its place on disk."""
        return Kept(self.builder, dict(self.parameters), self.target, PASS_CONFIGS)


_building = threading.Lock()  # TileLang traces and compiles one kernel at a time
_collecting: ContextVar[list[Spec] | None] = ContextVar("collecting", default=None)


@functools.cache
def target_for(device: torch.device) -> str:
    """What the kernels of a call on this device are compiled for."""
    if device.type == "cpu":
        return CPU
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU, to which the kernels' tiles are fitted; on a CPU tiles are fitted to nothing."""
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def build(target: str, builder: str, **parameters: Any) -> Kernel:
    """The kernel that `builder` ("module.function", with the module's full name) makes of the parameters.

    Dtypes may be torch's: a builder gets their names. Raises RuntimeError, with what is missing here, if it cannot be
    built.
    """
    spec = Spec(target, builder, tuple((name, _spelled(parameters[name])) for name in sorted(parameters)))
    if (collected := _collecting.get()) is not None:
        collected.append(spec)
        return _stand_in
    return kernel(spec)


@contextlib.contextmanager
def collecting() -> Iterator[list[Spec]]:
    """Inside, `build` builds nothing: it adds what it is asked for to this list and returns a kernel that does nothing.

    Whoever asks inside must not remember the kernel for later.
    """
    specs: list[Spec] = []
    token = _collecting.set(specs)
    try:
        yield specs
    finally:
        _collecting.reset(token)


def _stand_in(*_: Any) -> None:
    pass


@functools.cache
def kernel(spec: Spec) -> Kernel:
    """The kernel of `spec`, from disk or built."""
    with _building:
        return _kernel(spec)


@functools.cache  # again: other threads may have waited for this very kernel
def _kernel(spec: Spec) -> Kernel:
    if reason := missing_tilelang():
        raise RuntimeError(reason)
    kept = spec.kept()
    if (function := kept.load()) is not None:
        return function
    make_writable()
    if reason := import_failure():
        raise RuntimeError(reason)
    with kept.lock():
        if (function := kept.load()) is not None:  # another process has built it meanwhile
            return function
        try:
            return _compiled(spec, kept)
        except Exception as error:
            reason = missing_compilers(nvcc=spec.target != CPU) or f"{type(error).__name__}: {str(error)[-500:]}"
            raise RuntimeError(f"{spec.builder} cannot be compiled for {spec.target}: {reason}") from error


def _compiled(spec: Spec, kept: Kept) -> Kernel:
    if spec.target == CPU:
        from .cpu_trace import cpu_trace

        with cpu_trace():
            return compile_kernel(make(spec.builder, dict(spec.parameters)), CPU)
    compiled = compile_kernel(make(spec.builder, dict(spec.parameters)), spec.target)
    kept.keep(compiled)
    # The function itself: TileLang's own wrapper around it costs more host time than the launch.
    return compiled.adapter.get_exportable_executable()["main"]


def _spelled(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def make(builder: str, parameters: dict[str, Any]) -> Any:
    """The traced kernel, before any compilation."""
    module, _, name = builder.rpartition(".")
    return getattr(importlib.import_module(module), name)(**parameters)


def compile_kernel(kernel: Any, target: str) -> Any:
    """A traced kernel as TileLang's JITKernel for the target; no GPU is needed."""
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    import tilelang

    if target == CPU:
        return tilelang.compile(kernel, target=CPU, execution_backend="cython")
    architecture = {"kind": "cuda", "arch": target}
    return tilelang.compile(kernel, target=architecture, execution_backend="tvm_ffi", pass_configs=PASS_CONFIGS)
