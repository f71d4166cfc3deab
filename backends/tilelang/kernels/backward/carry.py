"""dM4: the gradient of the state, carried back over a sequence's chunks, with a snapshot for every chunk.

Per (sequence, value head, tile of V), chunk after chunk from the last on, with dSᵀ [tile, K] fp32 in registers:

    dhᵀ = dS      dv_new = Aqkᵀ do + kg dS      db = Ainvᵀ dv_new      dS <- diag(decay) dS + qgᵀ do - wᵀ dv_new

in: table [entries, HV, 64, width] (chunk_table.py, with Ainv), of which qg, kg, w, Aqk and Ainv; decay
    [entries, HV, K] fp32, d_o [B, T, HV, V], d_final_state fp32, or zeros
out: dh [entries, HV, V, K], the gradient of the state that leaves the chunk; ndb [entries, HV, 64, V], which is -db;
    d_initial_state fp32

b = beta (v - (k exp G) S) is the right side of (I + Akk) v_new = b, of which v_new is the solution; so that db is all
that M2 and M3 need of M4. It is off the path from one chunk to the next. The sign is the one in which it is needed.

Everything is transposed, as in the forward's carry.py. Rows of d_o past a sequence's end count as 0, whatever they are:
the table is 0 there, but they may be NaN. ndb is 0 there.
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from kda.golden.constants import CHUNK_SIZE as C

from ...chunk_table import columns
from ..carry import BY_COLUMNS_OF_V
from ..plan import chunks_per_sequence, nth_sequence, sequence
from ..state import load_state, state_tensor, store_state


def carry(
    *,
    HV: int,
    K: int,
    V: int,
    dtype: str,
    varlen: bool = False,
    cu_dtype: str = "int32",
    state_v_first: bool = True,
    has_d_final_state: bool = False,
    has_d_initial_state: bool = False,
    block_V: int = 64,
) -> Any:
    """Kernel (table, decay, d_o, [d_final_state], [cu_seqlens, order] | seq_len, dh, ndb, [d_initial_state]).

    The states exist with their flags; cu_seqlens [N + 1] and order [N] in the varlen form, else seq_len (an int).
    """
    f32 = "float32"
    tiles = V // block_V
    blocks = HV * tiles
    at = columns(K, V, with_ainv=True)
    B, L, entries, N, N1 = T.dynamic("B, L, entries, N, N1")
    sequences = N1 - 1 if varlen else N
    d_final_state_t = state_tensor(sequences, HV, K, V, state_v_first) if has_d_final_state else None
    d_initial_state_t = state_tensor(sequences, HV, K, V, state_v_first) if has_d_initial_state else None
    cu_seqlens_t = T.Tensor((N1,), cu_dtype) if varlen else None
    order_t = T.Tensor((sequences,), "int32") if varlen else None
    seq_len_t = None if varlen else T.int32

    @T.prim_func
    def kda_backward_carry(
        table: T.Tensor((entries, HV, C, at.width), dtype),
        decay: T.Tensor((entries, HV, K), f32),
        d_o: T.Tensor((B, L, HV, V), dtype),
        d_final_state: d_final_state_t,
        cu_seqlens: cu_seqlens_t,
        order: order_t,
        seq_len: seq_len_t,
        dh: T.Tensor((entries, HV, V, K), dtype),
        ndb: T.Tensor((entries, HV, C, V), dtype),
        d_initial_state: d_initial_state_t,
    ):
        d_o = T.reshape(d_o, (B * L, HV, V))
        num_sequences = N1 - 1 if varlen else entries // chunks_per_sequence(seq_len)
        with T.Kernel(num_sequences * blocks, threads=2 * block_V) as block:
            column = block % tiles * block_V
            hv = block // tiles % HV
            n = nth_sequence(block // tiles // HV, order, varlen)
            bos, length, base = sequence(n, cu_seqlens, seq_len, varlen)

            d_state = T.alloc_fragment((block_V, K), f32)
            d_state_h = T.alloc_fragment((block_V, K), dtype)
            do_h = T.alloc_fragment((block_V, C), dtype)
            ndv = T.alloc_fragment((block_V, C), f32)
            ndv_h = T.alloc_fragment((block_V, C), dtype)
            ndb_f = T.alloc_fragment((block_V, C), f32)
            ndb_s = T.alloc_shared((C, block_V), dtype)
            d_state_s = T.alloc_shared((block_V, K), dtype)
            do_s = T.alloc_shared((C, block_V), dtype)
            w_s = T.alloc_shared((C, K), dtype)
            kg_s = T.alloc_shared((C, K), dtype)
            qg_s = T.alloc_shared((C, K), dtype)
            aqk_s = T.alloc_shared((C, C), dtype)
            ainv_s = T.alloc_shared((C, C), dtype)
            decay_s = T.alloc_shared((K,), f32)
            T.annotate_layout({tile: make_swizzled_layout(tile) for tile in (do_s, ndb_s, d_state_s)})

            if has_d_final_state:
                load_state(d_final_state, n, hv, column, state_v_first, d_state)
            else:
                T.clear(d_state)
            chunks = T.ceildiv(length, C)
            for step in T.Pipelined(chunks, num_stages=2):
                c = chunks - 1 - step
                T.copy(d_o[bos + c * C : bos + c * C + C, hv, column : column + block_V], do_s)
                T.copy(table[base + c, hv, 0:C, at.aqk : at.aqk + C], aqk_s)
                T.copy(table[base + c, hv, 0:C, at.kg : at.kg + K], kg_s)
                T.copy(table[base + c, hv, 0:C, 0:K], qg_s)
                T.copy(decay[base + c, hv, 0:K], decay_s)
                T.copy(table[base + c, hv, 0:C, at.w : at.w + K], w_s)
                T.copy(table[base + c, hv, 0:C, at.ainv : at.ainv + C], ainv_s)
                # One statement to TileLang, as in the forward's carry.py.
                for _ in T.serial(1):
                    T.copy(d_state, d_state_h)
                    for j, i in T.Parallel(block_V, C):
                        do_h[j, i] = T.if_then_else(c * C + i < length, do_s[i, j], T.cast(0, dtype))
                    for j, i in T.Parallel(block_V, K):
                        d_state[j, i] = d_state[j, i] * decay_s[i]
                    T.wgmma_gemm(do_h, aqk_s, ndv, clear_accum=True, policy=BY_COLUMNS_OF_V)
                    T.wgmma_gemm(d_state_h, kg_s, ndv, transpose_B=True, policy=BY_COLUMNS_OF_V)
                    T.wgmma_gemm(do_h, qg_s, d_state, policy=BY_COLUMNS_OF_V)
                    T.wait_wgmma(1)
                    for j, i in T.Parallel(block_V, C):
                        ndv[j, i] = -ndv[j, i]
                    T.copy(ndv, ndv_h)
                    T.wgmma_gemm(ndv_h, w_s, d_state, policy=BY_COLUMNS_OF_V)
                    T.wgmma_gemm(ndv_h, ainv_s, ndb_f, clear_accum=True, policy=BY_COLUMNS_OF_V)
                    T.copy(d_state_h, d_state_s)
                    T.wait_wgmma(0)
                for j, i in T.Parallel(block_V, C):
                    ndb_s[i, j] = ndb_f[j, i]
                # Plain stores of whole lines, as in chunk_delta_h.py.
                T.copy(d_state_s, dh[base + c, hv, column : column + block_V, 0:K], disable_tma=True)
                T.copy(ndb_s, ndb[base + c, hv, 0:C, column : column + block_V], disable_tma=True)
            if has_d_initial_state:
                store_state(d_state, d_initial_state, n, hv, column, state_v_first)

    return kda_backward_carry
