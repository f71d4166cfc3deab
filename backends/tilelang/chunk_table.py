"""The chunk table: where a chunk's tensors live between the kernels, and which tokens belong to it.

A slot holds one chunk of CHUNK_SIZE tokens of one sequence. Sequence n with tokens [bos, eos) owns the slots

    base(n) + i,   0 <= i < ceil((eos - bos) / CHUNK_SIZE)
    base(n) = n * ceil(T / CHUNK_SIZE)               fixed length, [B, T, ...] read as [B * T, ...]
    base(n) = cu_seqlens[n] // CHUNK_SIZE + n        varlen

The varlen form needs no prefix sum over chunk counts: floor(b/C) - floor(a/C) + 1 >= ceil((b - a)/C), so sequences
never meet, at the price of at most one unused slot each. Nothing about the lengths has to reach the host: `num_slots`
follows from shapes alone, and the kernel `plan` tells each slot its sequence.

Tensors in the table are [slots, HV, CHUNK_SIZE, ...]. Rows past a sequence's end are zero in them, so a kernel that
reads the table needs no masks; an unused slot is neither written nor read.

This file and the kernels' do without `from __future__ import annotations`: TileLang reads the types of a kernel's
arguments from its annotations, and an argument annotated None does not exist in that build.
"""

from typing import Any

import tilelang.language as T

from kda.golden.constants import CHUNK_SIZE

UNUSED = -1
"""`slot_seq` of a slot that no sequence owns."""

_CLEARING_BLOCKS = 128
"""Blocks of `plan` that clear padding: enough to fill the memory bandwidth of a GPU, cheap where there is none."""

_THREADS = 128


def num_slots(total_tokens: int, num_sequences: int, varlen: bool) -> int:
    """Slots of a call of B * T tokens in all and B (or len(cu_seqlens) - 1) sequences."""
    if varlen:
        return total_tokens // CHUNK_SIZE + num_sequences
    return num_sequences * -(-total_tokens // (max(num_sequences, 1) * CHUNK_SIZE))


def sequence(n: Any, cu_seqlens: Any, seq_len: Any, varlen: bool) -> tuple[Any, Any, Any]:
    """Inside a kernel: (first token, length, first slot) of sequence n, as int32 expressions."""
    if varlen:
        bos = T.cast(cu_seqlens[n], "int32")
        return bos, T.cast(cu_seqlens[n + 1], "int32") - bos, bos // CHUNK_SIZE + n
    return n * seq_len, seq_len, n * chunks_per_sequence(seq_len)


def chunks_per_sequence(seq_len: Any) -> Any:
    """Inside a kernel: slots of one sequence of the fixed-length form; the max shows the compiler a divisor > 0."""
    return T.max(T.ceildiv(seq_len, CHUNK_SIZE), 1)


@T.macro
def chunk(slot: Any, cu_seqlens: Any, slot_seq: Any, seq_len: Any, varlen: bool):
    """Inside a kernel: (first token, tokens from there to the end of the sequence) of a slot; (0, 0) of an unused one.

    Variables, because the compiler would repeat an expression's division at every use.
    """
    t0 = T.alloc_var("int32")
    rows = T.alloc_var("int32")
    n = T.alloc_var("int32")
    n = slot_seq[slot] if varlen else slot // chunks_per_sequence(seq_len)
    t0 = 0
    rows = 0
    if n >= 0:
        bos, length, base = sequence(n, cu_seqlens, seq_len, varlen)
        t0 = bos + (slot - base) * CHUNK_SIZE
        rows = length - (slot - base) * CHUNK_SIZE
    return t0, rows


def plan(*, HV: int, V: int, dtype: str, cu_dtype: str) -> Any:
    """Kernel (cu_seqlens [N + 1], slot_seq [slots] int32 out, o [T, HV, V] out) for varlen calls.

    slot_seq[s] becomes the sequence that owns slot s, or UNUSED. Rows of o past cu_seqlens[N] are padding and become 0;
    no other row is touched.
    """
    N1, S, total = T.dynamic("N1, S, total")

    @T.prim_func
    def kda_plan(
        cu_seqlens: T.Tensor((N1,), cu_dtype),
        slot_seq: T.Tensor((S,), "int32"),
        o: T.Tensor((total, HV, V), dtype),
    ):
        # One block a sequence marks its slots (the last one those behind all sequences), the others clear the padding.
        with T.Kernel(N1 + _CLEARING_BLOCKS, threads=_THREADS) as block:
            if block < N1:
                bos = T.cast(cu_seqlens[block], "int32")
                eos = T.cast(cu_seqlens[T.min(block + 1, N1 - 1)], "int32")
                first = bos // CHUNK_SIZE + block
                owned = T.if_then_else(block < N1 - 1, eos // CHUNK_SIZE + block + 1, S) - first
                for i in T.serial(T.ceildiv(owned, _THREADS)):
                    for t in T.Parallel(_THREADS):
                        if i * _THREADS + t < owned:
                            slot_seq[first + i * _THREADS + t] = T.if_then_else(
                                i * _THREADS + t < T.ceildiv(eos - bos, CHUNK_SIZE), block, UNUSED
                            )
            else:
                clear = T.cast(cu_seqlens[N1 - 1], "int32") + block - N1
                for i in T.serial(T.ceildiv(T.max(total - clear, 0), _CLEARING_BLOCKS)):
                    for h, c in T.Parallel(HV, V):
                        o[clear + i * _CLEARING_BLOCKS, h, c] = 0

    return kda_plan
