"""Level 3, a decay for every token and channel: level 2 with sums of g where that had distances times g.

With G_i = g_0 + … + g_i in the chunk, per channel:

    qg_i = exp(G_i) q_i      kg_j = exp(G_last - G_j) k_j      Aqk_ij = Σ_d q_id k_jd exp(G_id - G_jd), j <= i
    O_c = qg S + Aqk V_c      S <- diag(exp G_last) S + kgᵀ V_c

q, k [B, N, H, K]   v, o [B, N, H, V], dtype   g [B, N, H, K] fp32, log decay <= 0, from MIN_LOG_DECAY on taken as that.
S and G in fp32: next to gates of -100, G keeps of weak ones what it has bits for, some 1e-4. What lies past the end of
a sequence reads as zero, and no state is read after it.
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from kda.backends.tilelang.kernels.activation import LOG2E
from kda.backends.tilelang.kernels.scores import HALF
from kda.golden.constants import CHUNK_SIZE as C
from kda.golden.constants import MIN_LOG_DECAY

from .tiles import store_chunk


@T.macro
def _cumulative(g_s: Any, run: Any, G_s: Any):
    """G_s [64, K] = running sums of the rows of g_s, in log2 units."""
    T.clear(run)
    for i in T.serial(C):
        for d in T.Parallel(run.shape[0]):
            run[d] = run[d] + LOG2E * T.max(g_s[i, d], MIN_LOG_DECAY)
            G_s[i, d] = run[d]


@T.macro
def _gated_scores(
    q_s: Any, k_s: Any, G_s: Any, a: Any, right_s: Any, left_s: Any, half: Any, half_rounded: Any, aqk_s: Any
):
    """aqk_s [64, 64] = Aqk, by bisection, so that every decay is a product of two factors <= 1 (see bisection.py).

    For j < i there is one s in 32, 16, …, 1 for which j lies in the left half of a group of 2 s rows and i in its right
    half. With `last`, the last row of the left half:  exp(G_i - G_j) = exp(G_i - G_last) exp(G_last - G_j).  The right
    rows of all groups times the left ones is one product of 32 rows; its s x s blocks on the diagonal count. Rounded
    first and stored under the condition then: TileLang 0.1.15 loses the condition of a store that rounds.
    """
    T.gemm(q_s, k_s, a, transpose_B=True, clear_accum=True)
    for i, j in T.Parallel(C, C):
        a[i, j] = T.if_then_else(i == j, a[i, j], 0.0)
    T.copy(a, aqk_s)
    for s in (32, 16, 8, 4, 2, 1):
        for r, d in T.Parallel(HALF, q_s.shape[1]):
            right_s[r, d] = q_s[r + r // s * s + s, d] * T.exp2(
                G_s[r + r // s * s + s, d] - G_s[r // s * 2 * s + s - 1, d]
            )
        for r, d in T.Parallel(HALF, q_s.shape[1]):
            left_s[r, d] = k_s[r + r // s * s, d] * T.exp2(G_s[r // s * 2 * s + s - 1, d] - G_s[r + r // s * s, d])
        T.gemm(right_s, left_s, half, transpose_B=True, clear_accum=True)
        for i, j in T.Parallel(HALF, HALF):
            half_rounded[i, j] = half[i, j]
        for i, j in T.Parallel(HALF, HALF):
            if i // s == j // s:
                aqk_s[i + i // s * s + s, j + j // s * s] = half_rounded[i, j]


def gate_seq_in_loop(*, K: int, V: int, dtype: str, block_V: int = 32, threads: int = 128, num_stages: int = 1) -> Any:
    """Kernel (q, k, v, g, o): a block owns block_V columns of a head's state and takes it along the sequence."""
    B, N, H = T.dynamic("B, N, H")

    @T.prim_func
    def ladder_gate_seq_in_loop(
        q: T.Tensor((B, N, H, K), dtype),
        k: T.Tensor((B, N, H, K), dtype),
        v: T.Tensor((B, N, H, V), dtype),
        g: T.Tensor((B, N, H, K), "float32"),
        o: T.Tensor((B, N, H, V), dtype),
    ):
        with T.Kernel(V // block_V, H, B, threads=threads) as (tile, h, b):
            column = tile * block_V
            q_s = T.alloc_shared((C, K), dtype)
            k_s = T.alloc_shared((C, K), dtype)
            qg_s = T.alloc_shared((C, K), dtype)
            kg_s = T.alloc_shared((C, K), dtype)
            v_s = T.alloc_shared((C, block_V), dtype)
            g_s = T.alloc_shared((C, K), "float32")
            G_s = T.alloc_shared((C, K), "float32")
            run = T.alloc_fragment((K,), "float32")
            state = T.alloc_fragment((K, block_V), "float32")
            state_s = T.alloc_shared((K, block_V), dtype)
            a = T.alloc_fragment((C, C), "float32")
            right_s = T.alloc_shared((HALF, K), dtype)
            left_s = T.alloc_shared((HALF, K), dtype)
            half = T.alloc_fragment((HALF, HALF), "float32")
            half_rounded = T.alloc_fragment((HALF, HALF), dtype)
            aqk_s = T.alloc_shared((C, C), dtype)
            out = T.alloc_fragment((C, block_V), "float32")
            out_s = T.alloc_shared((C, block_V), dtype)
            T.annotate_layout({out_s: make_swizzled_layout(out_s)})

            T.clear(state)
            for c in T.Pipelined(T.ceildiv(N, C), num_stages=num_stages):
                T.copy(q[b, c * C : (c + 1) * C, h, :], q_s)
                T.copy(k[b, c * C : (c + 1) * C, h, :], k_s)
                T.copy(g[b, c * C : (c + 1) * C, h, :], g_s)
                T.copy(v[b, c * C : (c + 1) * C, h, column : column + block_V], v_s)
                T.copy(state, state_s)
                _cumulative(g_s, run, G_s)
                _gated_scores(q_s, k_s, G_s, a, right_s, left_s, half, half_rounded, aqk_s)
                for i, d in T.Parallel(C, K):
                    qg_s[i, d] = q_s[i, d] * T.exp2(G_s[i, d])
                T.gemm(qg_s, state_s, out, clear_accum=True)
                T.gemm(aqk_s, v_s, out)
                store_chunk(out, out_s, o, b, c, h, column)
                for i, d in T.Parallel(C, K):
                    kg_s[i, d] = k_s[i, d] * T.exp2(G_s[C - 1, d] - G_s[i, d])
                for i, j in T.Parallel(K, block_V):
                    state[i, j] = state[i, j] * T.exp2(G_s[C - 1, i])
                T.gemm(kg_s, v_s, state, transpose_A=True)

    return ladder_gate_seq_in_loop
