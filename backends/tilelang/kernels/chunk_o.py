"""M4's output from the snapshots that chunk_delta_h left, in parallel over (entry, value head, tile of V):

    o = qg hᵀ + Aqk v_new

in: table [entries, HV, 64, width] (chunk_table.py), of which qg and aqk; h [entries, HV, V, K],
    v_new [entries, HV, 64, V]
out: o [B, T, HV, V] (rows of sequences only)

With chunk_delta_h it is carry cut in two, as a backward pass will need it; no call takes that way yet. Assumes
rows past a sequence's end to be zero in the table and in v_new.
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from kda.golden.constants import CHUNK_SIZE as C

from ..chunk_table import columns
from .plan import chunk


def chunk_o(
    *,
    HV: int,
    K: int,
    V: int,
    dtype: str,
    varlen: bool = False,
    cu_dtype: str = "int32",
    block_V: int = 64,
) -> Any:
    """Kernel (table, h, v_new, [cu_seqlens, owner] | seq_len, o).

    cu_seqlens [N + 1] and owner [entries] in the varlen form, else seq_len (an int).
    """
    f32 = "float32"
    tiles = V // block_V
    at = columns(K, V, with_ainv=True)
    B, L, entries, N1 = T.dynamic("B, L, entries, N1")
    cu_seqlens_t = T.Tensor((N1,), cu_dtype) if varlen else None
    owner_t = T.Tensor((entries,), "int32") if varlen else None
    seq_len_t = None if varlen else T.int32

    @T.prim_func
    def kda_chunk_o(
        table: T.Tensor((entries, HV, C, at.width), dtype),
        h: T.Tensor((entries, HV, V, K), dtype),
        v_new: T.Tensor((entries, HV, C, V), dtype),
        cu_seqlens: cu_seqlens_t,
        owner: owner_t,
        seq_len: seq_len_t,
        o: T.Tensor((B, L, HV, V), dtype),
    ):
        o = T.reshape(o, (B * L, HV, V))
        with T.Kernel(entries * HV * tiles, threads=128) as block:
            column = block % tiles * block_V
            hv = block // tiles % HV
            entry = block // tiles // HV
            t0, rows = chunk(entry, cu_seqlens, owner, seq_len, varlen)
            if rows > 0:
                qg_s = T.alloc_shared((C, K), dtype)
                aqk_s = T.alloc_shared((C, C), dtype)
                h_s = T.alloc_shared((block_V, K), dtype)
                v_s = T.alloc_shared((C, block_V), dtype)
                out = T.alloc_fragment((C, block_V), f32)
                out_s = T.alloc_shared((C, block_V), dtype)
                T.annotate_layout({out_s: make_swizzled_layout(out_s)})
                T.copy(table[entry, hv, 0:C, at.aqk : at.aqk + C], aqk_s)
                T.copy(v_new[entry, hv, 0:C, column : column + block_V], v_s)
                T.copy(table[entry, hv, 0:C, 0:K], qg_s)
                T.copy(h[entry, hv, column : column + block_V, 0:K], h_s)
                T.gemm(aqk_s, v_s, out, clear_accum=True)
                T.gemm(qg_s, h_s, out, transpose_B=True)
                T.copy(out, out_s)
                for i, j in T.Parallel(C, block_V):
                    if i < rows:
                        o[t0 + i, hv, column + j] = out_s[i, j]

    return kda_chunk_o
