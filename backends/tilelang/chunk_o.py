"""M4's output from the snapshots that chunk_delta_h left, in parallel over (slot, value head, tile of V):

    o = qg hᵀ + Aqk v_new

in: table [slots, HV, 64, width] (chunk_table.py), of which qg and aqk; h [slots, HV, V, K], v_new [slots, HV, 64, V]
out: o [B, T, HV, V] (rows of sequences only)

With chunk_delta_h it is the recurrence cut in two, as a backward pass will need it; no call takes that way yet. Assumes
rows past a sequence's end to be zero in the table and in v_new.
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from kda.golden.constants import CHUNK_SIZE as C

from .chunk_table import columns
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
    """Kernel (table, h, v_new, [cu_seqlens, slot_seq] | seq_len, o).

    cu_seqlens [N + 1] and slot_seq [slots] in the varlen form, else seq_len (an int).
    """
    f32 = "float32"
    tiles = V // block_V
    at = columns(K, V)
    B, L, slots, N1 = T.dynamic("B, L, slots, N1")
    cu_seqlens_t = T.Tensor((N1,), cu_dtype) if varlen else None
    slot_seq_t = T.Tensor((slots,), "int32") if varlen else None
    seq_len_t = None if varlen else T.int32

    @T.prim_func
    def kda_chunk_o(
        table: T.Tensor((slots, HV, C, at.width), dtype),
        h: T.Tensor((slots, HV, V, K), dtype),
        v_new: T.Tensor((slots, HV, C, V), dtype),
        cu_seqlens: cu_seqlens_t,
        slot_seq: slot_seq_t,
        seq_len: seq_len_t,
        o: T.Tensor((B, L, HV, V), dtype),
    ):
        o = T.reshape(o, (B * L, HV, V))
        with T.Kernel(slots * HV * tiles, threads=128) as block:
            column = block % tiles * block_V
            hv = block // tiles % HV
            slot = block // tiles // HV
            t0, rows = chunk(slot, cu_seqlens, slot_seq, seq_len, varlen)
            if rows > 0:
                qg_s = T.alloc_shared((C, K), dtype)
                aqk_s = T.alloc_shared((C, C), dtype)
                h_s = T.alloc_shared((block_V, K), dtype)
                v_s = T.alloc_shared((C, block_V), dtype)
                out = T.alloc_fragment((C, block_V), f32)
                out_s = T.alloc_shared((C, block_V), dtype)
                T.annotate_layout({out_s: make_swizzled_layout(out_s)})
                T.copy(table[slot, hv, 0:C, at.aqk : at.aqk + C], aqk_s)
                T.copy(v_new[slot, hv, 0:C, column : column + block_V], v_s)
                T.copy(table[slot, hv, 0:C, 0:K], qg_s)
                T.copy(h[slot, hv, column : column + block_V, 0:K], h_s)
                T.gemm(aqk_s, v_s, out, clear_accum=True)
                T.gemm(qg_s, h_s, out, transpose_B=True)
                T.copy(out, out_s)
                for i, j in T.Parallel(C, block_V):
                    if i < rows:
                        o[t0 + i, hv, column + j] = out_s[i, j]

    return kda_chunk_o
