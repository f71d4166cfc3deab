"""From a call to the kernels that it needs: what they are built for, and their builds, one per process and kind.

Batch, lengths and the number of sequences are symbolic: one build serves them all. On disk, `artefacts` keeps them.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from kda.backends.call import KdaCall

from .artefacts import Entry

CPU = "c"
"""Target of the CPU execution path, which computes in float32."""

HOPPER = "sm_90a"
"""The one GPU architecture that the kernels are tuned and proved for; prepare has a thread-level twin for it."""

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


def dtypes(call: KdaCall) -> dict[str, torch.dtype]:
    """What a kernel gets: `dtype` (q, k, v, o), `g_dtype` and `beta_dtype`."""
    if target_for(call.q.device) == CPU:
        return dict.fromkeys(("dtype", "g_dtype", "beta_dtype"), torch.float32)
    return {"dtype": call.q.dtype, "g_dtype": call.g.dtype, "beta_dtype": call.beta.dtype}


def activation(call: KdaCall) -> dict[str, bool]:
    """What M1 does, as a kernel's builder takes it."""
    return {
        "use_qk_l2norm": call.use_qk_l2norm_in_kernel, "use_gate": call.use_gate_in_kernel,
        "bounded_gate": call.lower_bound is not None, "use_beta_sigmoid": call.use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": call.allow_neg_eigval,
    }  # fmt: skip


@functools.cache
def build(target: str, builder: str, **parameters: Any) -> Kernel:
    """The kernel that `builder`, a function in a module of this package ("module.function"), makes of the parameters.

    Dtypes may be torch's: a builder gets their names.
    """
    parameters = {name: _spelled(value) for name, value in parameters.items()}
    if target == CPU:
        from .cpu_trace import cpu_trace

        with cpu_trace():
            return compile_kernel(_make(builder, parameters), CPU)
    entry = Entry(target, builder, parameters)
    if (function := entry.load()) is None:
        kernel = compile_kernel(_make(builder, parameters), target)
        entry.keep(kernel)
        # The function itself: TileLang's own wrapper around it costs more host time than the launch.
        function = kernel.adapter.get_exportable_executable()["main"]
    return function


def _spelled(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _make(builder: str, parameters: dict[str, Any]) -> Any:
    module, _, name = builder.rpartition(".")
    return getattr(importlib.import_module(f".{module}", __package__), name)(**parameters)


def compile_kernel(kernel: Any, target: str) -> Any:
    """A traced kernel as TileLang's JITKernel for the target; no GPU is needed."""
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    import tilelang

    if target == CPU:
        return tilelang.compile(kernel, target=CPU, execution_backend="cython")
    return tilelang.compile(
        kernel, target={"kind": "cuda", "arch": target}, execution_backend="tvm_ffi",
        pass_configs={tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True},
    )  # fmt: skip
