"""The kernels that a call needs, built once a configuration and process; on disk TileLang's own cache keeps them.

A configuration is what a kernel is specialised for. Batch, lengths and the number of sequences are symbolic: one build
serves them all.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kda.backends.call import KdaCall

from .artefacts import Entry

CPU = "c"
"""Target of the CPU execution path, which computes in float32."""

HOPPER = "sm_90a"
"""The one GPU architecture that the kernels are tuned and proved for; prepare has a thread-level twin for it."""


PREPARE = {CPU: "prepare.prepare", HOPPER: "prepare_hopper.prepare"}
"""prepare's twins."""


class Config(NamedTuple):
    """What the kernels of a call are built for; dtypes by their TileLang names."""

    target: str  # CPU, or a GPU architecture such as sm_90a
    H: int
    HV: int
    K: int
    V: int
    dtype: str
    g_dtype: str
    beta_dtype: str
    cu_dtype: str | None  # None: fixed length
    use_qk_l2norm: bool
    use_gate: bool
    bounded_gate: bool
    use_beta_sigmoid: bool
    allow_neg_eigval: bool
    state_v_first: bool
    has_initial_state: bool
    has_final_state: bool
    block_V: int  # columns of V to a block of the recurrence


def config(call: KdaCall) -> Config:
    """The configuration that serves this call on its device."""
    target = target_for(call.q.device)
    dtypes = [call.q.dtype, call.g.dtype, call.beta.dtype] if target != CPU else [torch.float32] * 3
    return Config(
        target, call.H, call.HV, call.K, call.V, *map(dtype_name, dtypes),
        None if call.cu_seqlens is None else dtype_name(call.cu_seqlens.dtype),
        call.use_qk_l2norm_in_kernel, call.use_gate_in_kernel, call.lower_bound is not None,
        call.use_beta_sigmoid_in_kernel, call.allow_neg_eigval,
        call.state_v_first, call.initial_state is not None, call.output_final_state,
        32 if target == CPU else _block_V(call.N * call.HV, call.V, processors(call.q.device)),
    )  # fmt: skip


def _block_V(states: int, V: int, processors: int) -> int:
    """The widest tile of V that still occupies most of the processors: a narrower one reads qg, kg and w more often."""
    width = V
    while width > 32 and states * (V // width) < 0.7 * processors:
        width //= 2
    return width


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def target_for(device: torch.device) -> str:
    """What the kernels of a call on this device are compiled for."""
    if device.type == "cpu":
        return CPU
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def kernels(config: Config) -> Kernels:
    """The kernels for a configuration, none of them built yet."""
    return Kernels(config)


class Kernels:
    """The kernels of one configuration; each is built when it is first used."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._shape = {"HV": config.HV, "K": config.K, "V": config.V, "dtype": config.dtype}
        self._lengths = {"varlen": config.cu_dtype is not None, "cu_dtype": config.cu_dtype or "int32"}
        self._states = {"state_v_first": config.state_v_first, "has_initial_state": config.has_initial_state,
                        "has_final_state": config.has_final_state}  # fmt: skip

    @functools.cached_property
    def plan(self) -> Callable[..., None]:
        c = self.config
        return build(c.target, "plan.plan", HV=c.HV, V=c.V, dtype=c.dtype, cu_dtype=c.cu_dtype)

    @functools.cached_property
    def prepare(self) -> Callable[..., None]:
        c = self.config
        return build(
            c.target, PREPARE[c.target], H=c.H, g_dtype=c.g_dtype, beta_dtype=c.beta_dtype,
            use_qk_l2norm=c.use_qk_l2norm, use_gate=c.use_gate, bounded_gate=c.bounded_gate,
            use_beta_sigmoid=c.use_beta_sigmoid, allow_neg_eigval=c.allow_neg_eigval, **self._shape, **self._lengths,
        )  # fmt: skip

    @functools.cached_property
    def recurrence(self) -> Callable[..., None]:
        return self._over_sequences("recurrence.recurrence")

    @functools.cached_property
    def chunk_delta_h(self) -> Callable[..., None]:
        return self._over_sequences("chunk_delta_h.chunk_delta_h")

    def _over_sequences(self, builder: str) -> Callable[..., None]:
        """A kernel that walks the chunks; threads and pipeline depth as timed on an H200 (docs/performance.md)."""
        width = self.config.block_V
        return build(
            self.config.target, builder, block_V=width, threads=256 if width >= 128 else 128,
            num_stages=3 if width == 32 else 2, **self._shape, **self._lengths, **self._states,
        )  # fmt: skip


@functools.cache
def build(target: str, builder: str, **parameters: Any) -> Callable[..., None]:
    """The kernel that `builder`, a function in a module of this package, makes of the parameters."""
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
