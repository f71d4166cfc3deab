"""Into L2, while a block computes: what the block that follows on its multiprocessor is going to read."""

from typing import Any

import tilelang.language as T
import torch

from kda.golden.constants import CHUNK_SIZE as C

PROCESSORS = 132
"""Of an H100 or H200. So many blocks ahead, times those that one of them runs at a time, lies the one that follows."""

LINE = 128
"""Bytes of a cache line."""

PRELUDE = """
static __device__ __forceinline__ void prefetch_line(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line) : "memory");
}
static __device__ __forceinline__ void prefetch_bulk(const void* start, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(start), "r"(bytes) : "memory");
}
"""


@T.macro
def prefetch_rows(x: Any, token: Any, head: Any, group: int):
    """The chunk's rows of x [tokens, heads, D] from `token` on, a line each by the threads of one of the groups that
    are as large. Where a sequence ends before, they may be others than those that will be read."""
    thread = T.get_thread_binding()
    width = LINE // itemsize(x.dtype)
    lines = int(x.shape[2]) // width
    if T.And(thread // (C * lines) == group, token + thread // lines % C < x.shape[0]):
        T.call_extern(
            "handle", "prefetch_line", T.address_of(x[token + thread // lines % C, head, thread % lines * width])
        )


@T.macro
def prefetch_tile(x: Any, entry: Any, head: Any, thread: int):
    """x[entry, head], by one thread."""
    if T.get_thread_binding() == thread:
        T.call_extern(
            "handle",
            "prefetch_bulk",
            T.address_of(x[entry, head, 0, 0]),
            T.uint32(itemsize(x.dtype) * x.shape[2] * x.shape[3]),
        )


def itemsize(dtype: Any) -> int:
    """Bytes of an element, of a dtype or its name."""
    return getattr(torch, str(dtype)).itemsize
