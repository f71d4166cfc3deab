"""The states that enter a sequence's segments (segments.py), one after another:

    states[first] = initial state        S <- M S + B

Per (sequence, value head, 64 columns of V), with Sᵀ fp32 in registers. M and S enter the product as sums of two tiles
of the dtype, of which three products count: with one of each, what near-identical keys leave in the state would be
lost.

in: transition [F, HV, 2, K, K], M as such a sum; offset [F, HV, V, K] fp32, Bᵀ; initial_state fp32, or zeros
out: states [F + N, HV, V, K] fp32, Sᵀ

Nothing here depends on what a map is a map of: it may be of any run of tokens that hands on a state.
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from .carry import BY_COLUMNS_OF_V
from .state import load_state, state_tensor

COLUMNS = 64
"""Of V that a block, a warpgroup, has in registers."""


def scan(
    *, HV: int, K: int, V: int, dtype: str, varlen: bool = False, state_v_first: bool = True, has_initial_state: bool
) -> Any:
    """Kernel (transition, offset, [initial_state], [runs] | pieces, states).

    initial_state exists with its flag; runs [N, 3], of each sequence (first rank, followed segments, rank of the last
    one), in the varlen form, else pieces, the segments of each sequence (an int).
    """
    f32 = "float32"
    tiles = V // COLUMNS
    N, F, S = T.dynamic("N, F, S")
    initial_state_t = state_tensor(N, HV, K, V, state_v_first) if has_initial_state else None
    runs_t = T.Tensor((N, 3), "int32") if varlen else None
    pieces_t = None if varlen else T.int32

    @T.prim_func
    def kda_scan(
        transition: T.Tensor((F, HV, 2, K, K), dtype),
        offset: T.Tensor((F, HV, V, K), f32),
        initial_state: initial_state_t,
        runs: runs_t,
        pieces: pieces_t,
        states: T.Tensor((S, HV, V, K), f32),
    ):
        with T.Kernel((S - F) * HV * tiles, threads=2 * COLUMNS) as block:
            # TileLang leaves these out where variables are set beside the loads.
            T.annotate_producer_reg_dealloc(24)
            T.annotate_consumer_reg_alloc(240)
            column = block % tiles * COLUMNS
            hv = block // tiles % HV
            n = block // tiles // HV
            first = T.alloc_var("int32")
            steps = T.alloc_var("int32")
            last = T.alloc_var("int32")
            first = runs[n, 0] if varlen else n * (pieces - 1)
            steps = runs[n, 1] if varlen else pieces - 1
            last = runs[n, 2] if varlen else F + n

            state = T.alloc_fragment((COLUMNS, K), f32)
            entering = T.alloc_fragment((COLUMNS, K), f32)
            state_h = T.alloc_fragment((COLUMNS, K), dtype)
            rest_h = T.alloc_fragment((COLUMNS, K), dtype)
            m_s = T.alloc_shared((K, K), dtype)
            m_rest_s = T.alloc_shared((K, K), dtype)
            b_s = T.alloc_shared((COLUMNS, K), f32)
            T.annotate_layout({b_s: make_swizzled_layout(b_s)})

            if has_initial_state:
                load_state(initial_state, n, hv, column, state_v_first, state)
            else:
                T.clear(state)
            for p in T.Pipelined(steps, num_stages=2):
                T.copy(transition[first + p, hv, 1, 0:K, 0:K], m_rest_s)
                T.copy(transition[first + p, hv, 0, 0:K, 0:K], m_s)
                T.copy(offset[first + p, hv, column : column + COLUMNS, 0:K], b_s)
                # One statement to TileLang, as in carry.py.
                for _ in T.serial(1):
                    T.copy(state, entering)
                    T.copy(state, state_h)
                    for j, i in T.Parallel(COLUMNS, K):
                        state[j, i] = state[j, i] - T.cast(state_h[j, i], f32)
                    T.copy(state, rest_h)
                    for j, i in T.Parallel(COLUMNS, K):
                        state[j, i] = b_s[j, i]
                    T.wgmma_gemm(state_h, m_rest_s, state, transpose_B=True, policy=BY_COLUMNS_OF_V)
                    T.wgmma_gemm(rest_h, m_s, state, transpose_B=True, policy=BY_COLUMNS_OF_V)
                    T.wgmma_gemm(state_h, m_s, state, transpose_B=True, policy=BY_COLUMNS_OF_V)
                    for j, i in T.Parallel(COLUMNS, K):
                        states[first + p, hv, column + j, i] = entering[j, i]
                    T.wait_wgmma(0)
            for j, i in T.Parallel(COLUMNS, K):
                states[last, hv, column + j, i] = state[j, i]

    return kda_scan
