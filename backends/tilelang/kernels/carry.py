"""M4 in one kernel: the state carried over a sequence's chunks, and their output, for calls that need no snapshots.

Per (sequence, value head, tile of V), chunk after chunk, with Sᵀ [tile, K] fp32 in registers:

    v_new = u - w S      o = qg S + Aqk v_new      S <- diag(decay) S + kgᵀ v_new

in: table [entries, HV, 64, width] (chunk_table.py), decay [entries, HV, K] fp32, initial_state fp32, or zeros
out: o [B, T, HV, V] (rows of sequences only), final_state fp32

Where sequences are cut into segments (segments.py), a block walks one of these in place of a sequence, and what it
starts from is the segment's of the states [segments, HV, V, K] fp32.

The sequence stays out of the grid, so that nothing is computed twice; V is cut, because its columns never meet, and K
is not, because products contract over it. Assumes rows past a sequence's end to be zero in the table, and so masks
nothing but the store of o.

Everything is transposed: Sᵀ and v_newᵀ are left operands, which a warpgroup (64 columns of V) keeps in registers, so
that nothing passes through shared memory between the products. qg S runs while v_new is computed.
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from kda.golden.constants import CHUNK_SIZE as C

from ..chunk_table import columns
from .plan import chunks_per_sequence, nth_sequence, sequence
from .segments import segment
from .state import load_state, state_tensor, store_state

BY_COLUMNS_OF_V = T.GemmWarpPolicy.FullRow

STAGES = {64: 3, 128: 2}
"""Chunks in shared memory at a time, by the width of the tile: as many as fit with K = 128."""


def carry(
    *,
    HV: int,
    K: int,
    V: int,
    dtype: str,
    with_ainv: bool,
    varlen: bool = False,
    cu_dtype: str = "int32",
    state_v_first: bool = True,
    has_initial_state: bool = False,
    has_final_state: bool = False,
    block_V: int = 64,
    cut: bool = False,
) -> Any:
    """Kernel (table, decay, [initial_state], [cu_seqlens, order] | seq_len, o, [final_state]), or with `cut`
    (table, decay, states, [cu_seqlens, segments] | seq_len, size, o, [final_state]).

    `with_ainv` tells the width of the table, which nobody but its maker knows; Ainv itself is not read. The states
    exist with their flags; cu_seqlens [N + 1] and order [N] or segments [segments, 3] in the varlen form, else seq_len
    and size, both ints.
    """
    f32 = "float32"
    tiles = V // block_V
    blocks = HV * tiles
    at = columns(K, V, with_ainv=with_ainv)
    B, L, entries, N, N1, S = T.dynamic("B, L, entries, N, N1, S")
    sequences = N1 - 1 if varlen else N
    initial_state_t = state_tensor(sequences, HV, K, V, state_v_first) if has_initial_state and not cut else None
    states_t = state_tensor(S, HV, K, V, state_v_first=True) if cut else None
    final_state_t = state_tensor(sequences, HV, K, V, state_v_first) if has_final_state else None
    cu_seqlens_t = T.Tensor((N1,), cu_dtype) if varlen else None
    order_t = T.Tensor((sequences,), "int32") if varlen and not cut else None
    segments_t = T.Tensor((S, 3), "int32") if varlen and cut else None
    seq_len_t = None if varlen else T.int32
    size_t = T.int32 if cut and not varlen else None

    @T.prim_func
    def kda_carry(
        table: T.Tensor((entries, HV, C, at.width), dtype),
        decay: T.Tensor((entries, HV, K), f32),
        initial_state: initial_state_t,
        states: states_t,
        cu_seqlens: cu_seqlens_t,
        order: order_t,
        segments: segments_t,
        seq_len: seq_len_t,
        size: size_t,
        o: T.Tensor((B, L, HV, V), dtype),
        final_state: final_state_t,
    ):
        o = T.reshape(o, (B * L, HV, V))
        num_sequences = N1 - 1 if varlen else entries // chunks_per_sequence(seq_len)
        with T.Kernel((S if cut else num_sequences) * blocks, threads=2 * block_V) as block:
            column = block % tiles * block_V
            hv = block // tiles % HV
            rank = block // tiles // HV
            # The walk: its first token, tokens from there to the sequence's end, its first entry, its chunks.
            if cut:
                n, t0, rows, entry, chunks = segment(rank, cu_seqlens, segments, seq_len, size, num_sequences, varlen)
            else:
                n = nth_sequence(rank, order, varlen)
                t0, rows, entry = sequence(n, cu_seqlens, seq_len, varlen)
                chunks = T.ceildiv(rows, C)

            state = T.alloc_fragment((block_V, K), f32)
            state_h = T.alloc_fragment((block_V, K), dtype)
            v_new = T.alloc_fragment((block_V, C), f32)
            v_new_h = T.alloc_fragment((block_V, C), dtype)
            out = T.alloc_fragment((block_V, C), f32)
            out_s = T.alloc_shared((C, block_V), dtype)
            w_s = T.alloc_shared((C, K), dtype)
            u_s = T.alloc_shared((C, block_V), dtype)
            kg_s = T.alloc_shared((C, K), dtype)
            qg_s = T.alloc_shared((C, K), dtype)
            aqk_s = T.alloc_shared((C, C), dtype)
            decay_s = T.alloc_shared((K,), f32)
            T.annotate_layout({tile: make_swizzled_layout(tile) for tile in (u_s, out_s)})

            if cut:
                load_state(states, rank, hv, column, True, state)
            elif has_initial_state:
                load_state(initial_state, n, hv, column, state_v_first, state)
            else:
                T.clear(state)
            for c in T.Pipelined(chunks, num_stages=STAGES[block_V]):
                T.copy(table[entry + c, hv, 0:C, at.w : at.w + K], w_s)
                T.copy(table[entry + c, hv, 0:C, at.u + column : at.u + column + block_V], u_s)
                T.copy(decay[entry + c, hv, 0:K], decay_s)
                T.copy(table[entry + c, hv, 0:C, at.kg : at.kg + K], kg_s)
                T.copy(table[entry + c, hv, 0:C, 0:K], qg_s)
                T.copy(table[entry + c, hv, 0:C, at.aqk : at.aqk + C], aqk_s)
                # One statement to TileLang, which hands a tile back to the loads after the last statement that reads
                # it: here, when the products are done, and not when they are issued.
                for _ in T.serial(1):
                    T.copy(state, state_h)
                    for j, i in T.Parallel(block_V, K):
                        state[j, i] = state[j, i] * decay_s[i]
                    T.wgmma_gemm(state_h, w_s, v_new, transpose_B=True, clear_accum=True, policy=BY_COLUMNS_OF_V)
                    T.wgmma_gemm(state_h, qg_s, out, transpose_B=True, clear_accum=True, policy=BY_COLUMNS_OF_V)
                    T.wait_wgmma(1)
                    for j, i in T.Parallel(block_V, C):
                        v_new[j, i] = u_s[i, j] - v_new[j, i]
                    T.copy(v_new, v_new_h)
                    T.wgmma_gemm(v_new_h, kg_s, state, policy=BY_COLUMNS_OF_V)
                    T.wgmma_gemm(v_new_h, aqk_s, out, transpose_B=True, policy=BY_COLUMNS_OF_V)
                    T.wait_wgmma(0)
                for j, i in T.Parallel(block_V, C):
                    out_s[i, j] = out[j, i]
                for i, j in T.Parallel(C, block_V):
                    if c * C + i < rows:
                        o[t0 + c * C + i, hv, column + j] = out_s[i, j]
            if has_final_state and cut:
                if T.And(n >= 0, rows <= chunks * C):  # no other segment follows
                    store_state(state, final_state, n, hv, column, state_v_first)
            elif has_final_state:
                store_state(state, final_state, n, hv, column, state_v_first)

    return kda_carry
