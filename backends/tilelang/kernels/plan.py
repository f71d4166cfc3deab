"""Which tokens belong to an entry of the chunk table (chunk_table.py), and which sequence is walked when: the kernel
that works it out for packed calls, and what the other kernels ask.

This file and the kernels' do without `from __future__ import annotations`: TileLang reads the types of a kernel's
arguments from its annotations, and an argument annotated None does not exist in that build.
"""

from typing import Any

import tilelang.language as T

from kda.golden.constants import CHUNK_SIZE

from ..chunk_table import UNUSED

_CLEARING_BLOCKS = 128
"""Blocks of `plan` that clear padding: enough to fill the memory bandwidth of a GPU, cheap where there is none."""

_THREADS = 128

_MAX_ORDERED = 4096
"""Sequences of which `plan` puts the longest first. More run in the order of the call: counting would cost N² reads."""


@T.macro
def nth_sequence(rank: Any, order: Any, varlen: bool):
    """Inside a kernel: the sequence that blocks of this rank walk. The long ones start first: a block's time is its
    sequence's length, and a long one that started last would run on alone, the other processors idle."""
    n = T.alloc_var("int32")
    n = order[rank] if varlen else rank
    return n


def sequence(n: Any, cu_seqlens: Any, seq_len: Any, varlen: bool) -> tuple[Any, Any, Any]:
    """Inside a kernel: (first token, length, first entry) of sequence n, as int32 expressions."""
    if varlen:
        bos = T.cast(cu_seqlens[n], "int32")
        return bos, T.cast(cu_seqlens[n + 1], "int32") - bos, bos // CHUNK_SIZE + n
    return n * seq_len, seq_len, n * chunks_per_sequence(seq_len)


def chunks_per_sequence(seq_len: Any) -> Any:
    """Inside a kernel: entries of one sequence of the fixed-length form; the max shows the compiler a divisor > 0."""
    return T.max(T.ceildiv(seq_len, CHUNK_SIZE), 1)


@T.macro
def chunk(entry: Any, cu_seqlens: Any, owner: Any, seq_len: Any, varlen: bool):
    """Inside a kernel: (first token, tokens from there to the sequence's end) of an entry; (0, 0) of an unused one.

    Variables, because the compiler would repeat an expression's division at every use.
    """
    t0 = T.alloc_var("int32")
    rows = T.alloc_var("int32")
    n = T.alloc_var("int32")
    n = owner[entry] if varlen else entry // chunks_per_sequence(seq_len)
    t0 = 0
    rows = 0
    if n >= 0:
        bos, length, base = sequence(n, cu_seqlens, seq_len, varlen)
        t0 = bos + (entry - base) * CHUNK_SIZE
        rows = length - (entry - base) * CHUNK_SIZE
    return t0, rows


@T.macro
def _clear_row(x: Any, row: Any):
    """x [1, T, heads, dim] or [1, T, heads]."""
    if len(x.shape) == 4:
        for h, c in T.Parallel(*x.shape[2:]):
            x[0, row, h, c] = 0
    else:
        for h in T.Parallel(x.shape[2]):
            x[0, row, h] = 0


def plan(
    *,
    HV: int,
    V: int,
    dtype: str,
    cu_dtype: str,
    K: int | None = None,
    g_dtype: str | None = None,
    beta_dtype: str | None = None,
) -> Any:
    """Kernel (cu_seqlens [N + 1], owner [entries], order [N], o [1, T, HV, V]) for varlen calls; all but cu_seqlens
    are outputs, owner and order int32.

    owner[s] becomes the sequence that owns entry s, or UNUSED; order the sequences from the longest on (equal
    ones as they come; beyond _MAX_ORDERED, all as they come). Rows of o before cu_seqlens[0] and from cu_seqlens[N] on
    are padding and become 0; no other row is touched. For the backward pass, which names K and the dtypes of g and
    beta, dv is in the place of o, and behind it come dq and dk, dg and dbeta, which are treated alike.
    """
    backward = K is not None
    N1, S, L = T.dynamic("N1, S, L")
    # dq and dk have a type each: TileLang takes one type for one tensor.
    dq_t = T.Tensor((1, L, HV, K), dtype) if backward else None
    dk_t = T.Tensor((1, L, HV, K), dtype) if backward else None
    dg_t = T.Tensor((1, L, HV, K), g_dtype) if backward else None
    dbeta_t = T.Tensor((1, L, HV), beta_dtype) if backward else None

    @T.prim_func
    def kda_plan(
        cu_seqlens: T.Tensor((N1,), cu_dtype),
        owner: T.Tensor((S,), "int32"),
        order: T.Tensor((N1 - 1,), "int32"),
        o: T.Tensor((1, L, HV, V), dtype),
        dq: dq_t,
        dk: dk_t,
        dg: dg_t,
        dbeta: dbeta_t,
    ):
        # One block a sequence marks its entries (the last one those behind all sequences) and counts the longer ones;
        # the others clear the padding.
        with T.Kernel(N1 + _CLEARING_BLOCKS, threads=_THREADS) as block:
            if block < N1:
                bos = T.cast(cu_seqlens[block], "int32")
                eos = T.cast(cu_seqlens[T.min(block + 1, N1 - 1)], "int32")
                lead = T.if_then_else(block == 0, bos // CHUNK_SIZE, 0)  # entries before the first sequence's
                first = bos // CHUNK_SIZE + block - lead
                owned = T.if_then_else(block < N1 - 1, eos // CHUNK_SIZE + block + 1, S) - first
                for i in T.serial(T.ceildiv(owned, _THREADS)):
                    for t in T.Parallel(_THREADS):
                        nth = i * _THREADS + t - lead
                        if nth + lead < owned:
                            owner[first + lead + nth] = T.if_then_else(
                                T.And(nth >= 0, nth < T.ceildiv(eos - bos, CHUNK_SIZE)), block, UNUSED
                            )
                if block < N1 - 1:
                    ordered = N1 - 1 <= _MAX_ORDERED
                    longer = T.alloc_fragment((1, _THREADS), "int32")
                    rank = T.alloc_fragment((1,), "int32")
                    T.clear(longer)
                    for i in T.serial(T.if_then_else(ordered, T.ceildiv(N1 - 1, _THREADS), 0)):
                        for t in T.Parallel(_THREADS):
                            m = T.min(i * _THREADS + t, N1 - 2)
                            other = T.cast(cu_seqlens[m + 1] - cu_seqlens[m], "int32")
                            before = T.Or(other > eos - bos, T.And(other == eos - bos, m < block))
                            longer[0, t] += T.if_then_else(T.And(i * _THREADS + t < N1 - 1, before), 1, 0)
                    T.reduce_sum(longer, rank, dim=1)
                    order[T.if_then_else(ordered, rank[0], block)] = block
            else:
                # Of the padding's rows, counted from the one behind all sequences on, every _CLEARING_BLOCKS-th.
                begin = T.cast(cu_seqlens[0], "int32")
                end = T.cast(cu_seqlens[N1 - 1], "int32")
                for i in T.serial(T.ceildiv(T.max(L - end + begin - (block - N1), 0), _CLEARING_BLOCKS)):
                    nth = block - N1 + i * _CLEARING_BLOCKS
                    row = T.if_then_else(nth < L - end, end + nth, nth - (L - end))
                    _clear_row(o, row)
                    if backward:
                        _clear_row(dq, row)
                        _clear_row(dk, row)
                        _clear_row(dg, row)
                        _clear_row(dbeta, row)

    return kda_plan
