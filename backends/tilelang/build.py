"""From a kernel's builder and its parameters to a function: one build per process and kind, kept on disk by `kept`.

Batch, lengths and the number of sequences are symbolic: one build serves them all.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from .kept import Kept

CPU = "c"
"""Target of the CPU execution path, which computes in float32."""

HOPPER = "sm_90a"
"""The one GPU architecture that the kernels are tuned and proved for; `kernels.sm90` is for it alone."""

PASS_CONFIGS = {"tl.enable_fast_math": True}
"""Of TileLang's compiler, for every kernel on a GPU; a kernel may ask for more."""

Kernel = Callable[..., None]


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


@functools.cache
def build(target: str, builder: str, **parameters: Any) -> Kernel:
    """The kernel that `builder` ("module.function", with the module's full name) makes of the parameters.

    Dtypes may be torch's: a builder gets their names.
    """
    parameters = {name: _spelled(value) for name, value in parameters.items()}
    if target == CPU:
        from .cpu_trace import cpu_trace

        with cpu_trace():
            return compile_kernel(make(builder, parameters), CPU)
    kept = Kept(builder, parameters, target, PASS_CONFIGS)
    if (function := kept.load()) is None:
        kernel = compile_kernel(make(builder, parameters), target)
        kept.keep(kernel)
        # The function itself: TileLang's own wrapper around it costs more host time than the launch.
        function = kernel.adapter.get_exportable_executable()["main"]
    return function


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
