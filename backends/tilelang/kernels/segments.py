"""What the kernels that walk segments (segments.py) ask: which chunks belong to one."""

from typing import Any

import tilelang.language as T

from kda.golden.constants import CHUNK_SIZE as C

from .plan import chunks_per_sequence, sequence


def followed(chunks: Any, size: Any) -> Any:
    """Inside a kernel: segments but the last one of a sequence."""
    return T.max(T.ceildiv(chunks, size), 1) - 1


@T.macro
def segment(rank: Any, cu_seqlens: Any, segments: Any, seq_len: Any, size: Any, sequences: Any, varlen: bool):
    """Inside a kernel, of the segment of this rank: (its sequence or UNUSED, its first token, tokens from there to the
    sequence's end, its first entry, its chunks). An unused one has no chunks, and but for that its values mean nothing.

    Variables, because the compiler would repeat an expression's division at every use.
    """
    n = T.alloc_var("int32")
    t0 = T.alloc_var("int32")
    rows = T.alloc_var("int32")
    entry = T.alloc_var("int32")
    chunks = T.alloc_var("int32")
    first = T.alloc_var("int32")  # chunk of the sequence
    if varlen:
        n = segments[rank, 0]
        first = segments[rank, 1]
        chunks = segments[rank, 2]
    else:
        whole = chunks_per_sequence(seq_len)
        ahead = followed(whole, size)
        n = T.if_then_else(rank < sequences * ahead, rank // T.max(ahead, 1), rank - sequences * ahead)
        first = T.if_then_else(rank < sequences * ahead, rank - n * ahead, ahead) * size
        chunks = T.min(size, whole - first)
    bos, length, base = sequence(T.max(n, 0), cu_seqlens, seq_len, varlen)
    t0 = bos + first * C
    rows = length - first * C
    entry = base + first
    return n, t0, rows, entry, chunks
