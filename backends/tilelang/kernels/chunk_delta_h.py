"""M4's carry, with a snapshot of the state for every chunk: what the backward pass, `stages` and chunk_o start from.

Per (sequence, value head, tile of V), chunk after chunk, with Sᵀ [tile, K] fp32 in registers, as in carry.py:

    hᵀ = S      v_new = u - w S      S <- diag(decay) S + kgᵀ v_new

in: table [entries, HV, 64, width] (chunk_table.py, with Ainv), of which kg, w and u; decay [entries, HV, K] fp32,
    initial_state fp32, or zeros
out: h [entries, HV, V, K], the state entering the chunk; v_new [entries, HV, 64, V]; final_state fp32

Assumes rows past a sequence's end to be zero in the table, and writes v_new so. Unused entries are left as they are.
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from kda.golden.constants import CHUNK_SIZE as C

from ..chunk_table import columns
from .carry import BY_COLUMNS_OF_V
from .plan import chunks_per_sequence, nth_sequence, sequence
from .state import load_state, state_tensor, store_state


def chunk_delta_h(
    *,
    HV: int,
    K: int,
    V: int,
    dtype: str,
    varlen: bool = False,
    cu_dtype: str = "int32",
    state_v_first: bool = True,
    has_initial_state: bool = False,
    has_final_state: bool = False,
    block_V: int = 64,
) -> Any:
    """Kernel (table, decay, [initial_state], [cu_seqlens, order] | seq_len, h, v_new, [final_state]).

    The states exist with their flags; cu_seqlens [N + 1] and order [N] in the varlen form, else seq_len (an int).
    """
    f32 = "float32"
    tiles = V // block_V
    blocks = HV * tiles
    at = columns(K, V, with_ainv=True)
    entries, N, N1 = T.dynamic("entries, N, N1")
    sequences = N1 - 1 if varlen else N
    initial_state_t = state_tensor(sequences, HV, K, V, state_v_first) if has_initial_state else None
    final_state_t = state_tensor(sequences, HV, K, V, state_v_first) if has_final_state else None
    cu_seqlens_t = T.Tensor((N1,), cu_dtype) if varlen else None
    order_t = T.Tensor((sequences,), "int32") if varlen else None
    seq_len_t = None if varlen else T.int32

    @T.prim_func
    def kda_chunk_delta_h(
        table: T.Tensor((entries, HV, C, at.width), dtype),
        decay: T.Tensor((entries, HV, K), f32),
        initial_state: initial_state_t,
        cu_seqlens: cu_seqlens_t,
        order: order_t,
        seq_len: seq_len_t,
        h: T.Tensor((entries, HV, V, K), dtype),
        v_new: T.Tensor((entries, HV, C, V), dtype),
        final_state: final_state_t,
    ):
        num_sequences = N1 - 1 if varlen else entries // chunks_per_sequence(seq_len)
        with T.Kernel(num_sequences * blocks, threads=2 * block_V) as block:
            column = block % tiles * block_V
            hv = block // tiles % HV
            n = nth_sequence(block // tiles // HV, order, varlen)
            _, length, base = sequence(n, cu_seqlens, seq_len, varlen)

            state = T.alloc_fragment((block_V, K), f32)
            state_h = T.alloc_fragment((block_V, K), dtype)
            v_new_f = T.alloc_fragment((block_V, C), f32)
            v_new_h = T.alloc_fragment((block_V, C), dtype)
            v_new_s = T.alloc_shared((C, block_V), dtype)
            w_s = T.alloc_shared((C, K), dtype)
            u_s = T.alloc_shared((C, block_V), dtype)
            kg_s = T.alloc_shared((C, K), dtype)
            decay_s = T.alloc_shared((K,), f32)
            state_s = T.alloc_shared((block_V, K), dtype)
            T.annotate_layout({tile: make_swizzled_layout(tile) for tile in (u_s, v_new_s, state_s)})

            if has_initial_state:
                load_state(initial_state, n, hv, column, state_v_first, state)
            else:
                T.clear(state)
            for c in T.Pipelined(T.ceildiv(length, C), num_stages=2):
                T.copy(table[base + c, hv, 0:C, at.w : at.w + K], w_s)
                T.copy(table[base + c, hv, 0:C, at.u + column : at.u + column + block_V], u_s)
                T.copy(decay[base + c, hv, 0:K], decay_s)
                T.copy(table[base + c, hv, 0:C, at.kg : at.kg + K], kg_s)
                # One statement to TileLang, as in carry.py.
                for _ in T.serial(1):
                    T.copy(state, state_h)
                    for j, i in T.Parallel(block_V, K):
                        state[j, i] = state[j, i] * decay_s[i]
                    T.wgmma_gemm(state_h, w_s, v_new_f, transpose_B=True, clear_accum=True, policy=BY_COLUMNS_OF_V)
                    T.copy(state_h, state_s)
                    T.wait_wgmma(0)
                    for j, i in T.Parallel(block_V, C):
                        v_new_f[j, i] = u_s[i, j] - v_new_f[j, i]
                    T.copy(v_new_f, v_new_h)
                    T.wgmma_gemm(v_new_h, kg_s, state, policy=BY_COLUMNS_OF_V)
                    for j, i in T.Parallel(block_V, C):
                        v_new_s[i, j] = v_new_h[j, i]
                    # Plain stores: TMA stores would have the loop wait until they have read the tiles. Whole lines
                    # through shared memory, since from registers they would be of four bytes.
                    T.copy(state_s, h[base + c, hv, column : column + block_V, 0:K], disable_tma=True)
                    T.copy(v_new_s, v_new[base + c, hv, 0:C, column : column + block_V], disable_tma=True)
                    T.wait_wgmma(0)
            if has_final_state:
                store_state(state, final_state, n, hv, column, state_v_first)

    return kda_chunk_delta_h
