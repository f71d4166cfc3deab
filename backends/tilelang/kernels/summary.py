"""What a segment does to the state that enters it: S_out = M S_in + B (segments.py), of every segment that another one
follows.

Per (segment, value head, 64 rows of M), from the segment's last chunk to its first, with X = M_last ... M_c of the
chunks behind in registers, X = I to begin with:

    y = X kgᵀ      B <- B + y u      X <- X diag(decay) - y w

since a chunk's own map is M_c = diag(decay) - kgᵀ w, B_c = kgᵀ u. In the end X = M. That is one product less than the
carry of M and of B forwards, both read the same tiles, and the chunks that the carry will read first are read last.

in: table [entries, HV, 64, width] (chunk_table.py), of which kg, w and u; decay [entries, HV, K] fp32
out: transition [F, HV, 2, K, K], M as the sum of two tiles of the dtype; offset [F, HV, V, K] fp32, Bᵀ

Rows of both that belong to no followed segment are left as they are. Rows past a sequence's end, which a followed
segment has none of, do not matter.
"""

from typing import Any

import tilelang.language as T

from kda.golden.constants import CHUNK_SIZE as C

from ..chunk_table import columns
from .plan import chunks_per_sequence
from .segments import segment

BY_ROWS = T.GemmWarpPolicy.FullRow
ROWS = 64
"""Of M and B that a block, a warpgroup, has in registers."""

STAGES = 4
"""Chunks in shared memory at a time."""


def summary(
    *, HV: int, K: int, V: int, dtype: str, with_ainv: bool, varlen: bool = False, cu_dtype: str = "int32"
) -> Any:
    """Kernel (table, decay, [cu_seqlens, segments] | seq_len, size, transition, offset).

    cu_seqlens [N + 1] and segments [F + N, 3] in the varlen form, else seq_len and size, both ints.
    """
    f32 = "float32"
    tiles = K // ROWS
    at = columns(K, V, with_ainv=with_ainv)
    entries, F, S, N1 = T.dynamic("entries, F, S, N1")
    cu_seqlens_t = T.Tensor((N1,), cu_dtype) if varlen else None
    segments_t = T.Tensor((S, 3), "int32") if varlen else None
    seq_len_t = None if varlen else T.int32
    size_t = None if varlen else T.int32

    @T.prim_func
    def kda_summary(
        table: T.Tensor((entries, HV, C, at.width), dtype),
        decay: T.Tensor((entries, HV, K), f32),
        cu_seqlens: cu_seqlens_t,
        segments: segments_t,
        seq_len: seq_len_t,
        size: size_t,
        transition: T.Tensor((F, HV, 2, K, K), dtype),
        offset: T.Tensor((F, HV, V, K), f32),
    ):
        sequences = N1 - 1 if varlen else entries // chunks_per_sequence(seq_len)
        with T.Kernel(F * HV * tiles, threads=2 * ROWS) as block:
            # TileLang leaves these out where variables are set beside the loads.
            T.annotate_producer_reg_dealloc(24)
            T.annotate_consumer_reg_alloc(240)
            row = block % tiles * ROWS
            hv = block // tiles % HV
            rank = block // tiles // HV
            n, _, left, entry, size_here = segment(rank, cu_seqlens, segments, seq_len, size, sequences, varlen)
            chunks = T.alloc_var("int32")
            chunks = T.if_then_else(T.And(n >= 0, left > size_here * C), size_here, 0)  # 0 of a sequence's last one

            x = T.alloc_fragment((ROWS, K), f32)
            x_h = T.alloc_fragment((ROWS, K), dtype)
            minus_b = T.alloc_fragment((ROWS, V), f32)
            y = T.alloc_fragment((ROWS, C), f32)
            y_h = T.alloc_fragment((ROWS, C), dtype)
            kg_s = T.alloc_shared((C, K), dtype)
            w_s = T.alloc_shared((C, K), dtype)
            u_s = T.alloc_shared((C, V), dtype)
            decay_s = T.alloc_shared((K,), f32)

            for i, j in T.Parallel(ROWS, K):
                x[i, j] = T.if_then_else(row + i == j, 1.0, 0.0)
            T.clear(minus_b)
            for step in T.Pipelined(chunks, num_stages=STAGES):
                c = entry + chunks - 1 - step
                T.copy(table[c, hv, 0:C, at.kg : at.kg + K], kg_s)
                T.copy(decay[c, hv, 0:K], decay_s)
                T.copy(table[c, hv, 0:C, at.w : at.w + K], w_s)
                T.copy(table[c, hv, 0:C, at.u : at.u + V], u_s)
                # One statement to TileLang, as in carry.py.
                for _ in T.serial(1):
                    T.copy(x, x_h)
                    for i, j in T.Parallel(ROWS, K):
                        x[i, j] = x[i, j] * decay_s[j]
                    T.wgmma_gemm(x_h, kg_s, y, transpose_B=True, clear_accum=True, policy=BY_ROWS)
                    T.wait_wgmma(0)
                    for i, j in T.Parallel(ROWS, C):
                        y[i, j] = -y[i, j]
                    T.copy(y, y_h)
                    T.wgmma_gemm(y_h, w_s, x, policy=BY_ROWS)
                    T.wgmma_gemm(y_h, u_s, minus_b, policy=BY_ROWS)
                    T.wait_wgmma(0)
            if chunks > 0:
                T.copy(x, x_h)
                for i, j in T.Parallel(ROWS, K):
                    transition[rank, hv, 0, row + i, j] = x_h[i, j]
                for i, j in T.Parallel(ROWS, K):
                    x[i, j] = x[i, j] - T.cast(x_h[i, j], f32)
                T.copy(x, x_h)
                for i, j in T.Parallel(ROWS, K):
                    transition[rank, hv, 1, row + i, j] = x_h[i, j]
                for i, j in T.Parallel(ROWS, V):
                    offset[rank, hv, j, row + i] = -minus_b[i, j]

    return kda_summary
