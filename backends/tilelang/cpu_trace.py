"""Tracing the kernels so that the very same source runs on the CPU, in float32.

TileLang's CPU target (`c`) knows no thread blocks: fragments, shared tiles and parallel loops have no meaning there. A
kernel of this folder is written on tiles alone, so it keeps its meaning when every tile becomes a plain array of one
sequential program and every parallel loop a serial one. `cpu_trace` exchanges exactly those names of
`tilelang.language` while a kernel is being traced; copies, T.gemm and element-wise code stay as they are.

What this proves: formulas, indices, masks, tails. What it cannot see: races, missing barriers, layouts, TMA, the
rounding of 16-bit operands, and whether a product that runs on by itself has been waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tilelang.language as T

CPU_TARGET = "c"
CPU_EXECUTION_BACKEND = "cython"


_Kernel = T.Kernel


@T.macro
def _sum_rows(source: Any, total: Any) -> None:
    """`T.reduce_sum(source, total, dim=1)` for a rank-2 tile."""
    for i in T.serial(source.shape[0]):
        total[i] = T.cast(0, total.dtype)
        for j in T.serial(source.shape[1]):
            total[i] = total[i] + source[i, j]


def _reduce_sum(source: Any, total: Any, dim: int = -1) -> None:
    if len(source.shape) != 2 or dim not in (1, -1):
        raise NotImplementedError(
            f"reduce_sum over dim {dim} of a rank-{len(source.shape)} tile is not traced on the CPU"
        )
    _sum_rows(source, total)


def _alloc_tile(shape: Any, dtype: str, *_: Any, **__: Any) -> Any:
    return T.alloc_local(shape, dtype)


def _parallel(*extents: Any, **_: Any) -> Any:
    return T.grid(*extents) if len(extents) > 1 else T.serial(extents[0])


def _pipelined(extent: Any, **_: Any) -> Any:
    return T.serial(extent)


def _gemm(a: Any, b: Any, c: Any, transpose_B: bool = False, clear_accum: bool = False, policy: Any = None) -> Any:
    """`T.wgmma_gemm`, done when it returns; the policy is for warps alone."""
    return T.gemm(a, b, c, transpose_B=transpose_B, clear_accum=clear_accum)


def _tma_copy(source: Any, target: Any, barrier: Any = None) -> Any:
    """A copy, done when it returns: nobody has to wait at the barrier."""
    return T.copy(source, target)


def _kernel(*blocks: Any, prelude: str = "", **options: Any) -> Any:
    """`T.Kernel` without the CUDA that stands before it, since `call_extern` does nothing."""
    return _Kernel(*blocks, **options)


def _thread() -> int:
    return 0


def _nothing(*_: Any, **__: Any) -> None:
    pass


_SEQUENTIAL = {
    "Kernel": _kernel,
    "call_extern": _nothing,
    "alloc_fragment": _alloc_tile,
    "alloc_shared": _alloc_tile,
    "Parallel": _parallel,
    "Pipelined": _pipelined,
    "reduce_sum": _reduce_sum,
    "wgmma_gemm": _gemm,
    "wait_wgmma": _nothing,
    "tma_copy": _tma_copy,
    "alloc_barrier": _nothing,
    "barrier_arrive": _nothing,
    "mbarrier_wait_parity": _nothing,
    "sync_threads": _nothing,
    "fence_proxy_async": _nothing,
    "get_thread_binding": _thread,
    "annotate_layout": _nothing,
    "annotate_producer_reg_dealloc": _nothing,
    "annotate_consumer_reg_alloc": _nothing,
}


@contextlib.contextmanager
def cpu_trace() -> Iterator[None]:
    """Inside the context, a kernel builder returns a prim_func that compiles for `CPU_TARGET`.

    It exchanges module attributes, so no other thread may trace a kernel meanwhile.
    """
    parallel_names = {name: getattr(T, name) for name in _SEQUENTIAL}
    for name, sequential in _SEQUENTIAL.items():
        setattr(T, name, sequential)
    try:
        yield
    finally:
        for name, original in parallel_names.items():
            setattr(T, name, original)
