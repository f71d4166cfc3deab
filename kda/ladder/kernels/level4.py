"""Level 4, the delta rule: level 1 with v_new, what the state still lacks of v, in v's place.

    v_new = Ainv diag(beta) (V_c - K_c S)      Ainv = (I + Akk)⁻¹      Akk = tril(diag(beta) K_c K_cᵀ, -1)
    O_c = Q_c S + tril(Q_c K_cᵀ) v_new      S <- S + K_cᵀ v_new

q, k [B, N, H, K]   v, o [B, N, H, V], dtype   beta [B, N, H] fp32, the step size; S in fp32. Stable while
beta |k|² <= 2. Ainv diag(beta) is a sum of two matrices of the dtype, for its rounding would be the largest of all.
What lies past the end of a sequence reads as zero.
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from kda.backends.tilelang.kernels.inverse import inverse_times_beta
from kda.backends.tilelang.kernels.scores import HALF
from kda.golden.constants import CHUNK_SIZE as C

from .tiles import scores, store_chunk


@T.macro
def _delta_inverse(k_s: Any, beta_s: Any, a: Any, akk_s: Any, akk_low: Any, akk_low_s: Any, t_s: Any, t_rest_s: Any):
    """t_s + t_rest_s [64, 64] = T, by way of Akk's two diagonal blocks and the block below them."""
    T.gemm(k_s, k_s, a, transpose_B=True, clear_accum=True)
    for i, j in T.Parallel(C, C):
        a[i, j] = a[i, j] * beta_s[i]
        akk_low[i, j] = a[i, j]
    for i, j in T.Parallel(C, C):
        if i // HALF == j // HALF:
            akk_s[i // HALF, i % HALF, j % HALF] = a[i, j]
    for i, j in T.Parallel(C, C):
        if i // HALF > j // HALF:
            akk_low_s[i % HALF, j] = akk_low[i, j]
    inverse_times_beta(akk_s, akk_low_s, beta_s, t_s, t_rest_s, None)


def delta_seq_in_loop(*, K: int, V: int, dtype: str, block_V: int = 32, threads: int = 128, num_stages: int = 1) -> Any:
    """Kernel (q, k, v, beta, o): a block owns block_V columns of a head's state and takes it along the sequence."""
    B, N, H = T.dynamic("B, N, H")
    split = dtype != "float32"
    operand_dtype = "float16" if split else dtype

    @T.prim_func
    def ladder_delta_seq_in_loop(
        q: T.Tensor((B, N, H, K), dtype),
        k: T.Tensor((B, N, H, K), dtype),
        v: T.Tensor((B, N, H, V), dtype),
        beta: T.Tensor((B, N, H), "float32"),
        o: T.Tensor((B, N, H, V), dtype),
    ):
        with T.Kernel(V // block_V, H, B, threads=threads) as (tile, h, b):
            column = tile * block_V
            q_s = T.alloc_shared((C, K), dtype)
            k_s = T.alloc_shared((C, K), dtype)
            v_s = T.alloc_shared((C, block_V), dtype)
            beta_s = T.alloc_shared((C,), "float32")
            state = T.alloc_fragment((K, block_V), "float32")
            state_s = T.alloc_shared((K, block_V), dtype)
            a = T.alloc_fragment((C, C), "float32")
            akk_s = T.alloc_shared((2, HALF, HALF), "float32")
            akk_low = T.alloc_fragment((C, C), operand_dtype)
            akk_low_s = T.alloc_shared((HALF, HALF), operand_dtype)
            t_s = T.alloc_shared((C, C), dtype)
            t_rest_s = T.alloc_shared((C, C), dtype) if split else None
            v_new = T.alloc_fragment((C, block_V), "float32")
            v_new_s = T.alloc_shared((C, block_V), dtype)
            aqk_s = T.alloc_shared((C, C), dtype)
            out = T.alloc_fragment((C, block_V), "float32")
            out_s = T.alloc_shared((C, block_V), dtype)
            T.annotate_layout({x: make_swizzled_layout(x) for x in (v_s, out_s)})

            T.clear(state)
            for c in T.Pipelined(T.ceildiv(N, C), num_stages=num_stages):
                T.copy(q[b, c * C : (c + 1) * C, h, :], q_s)
                T.copy(k[b, c * C : (c + 1) * C, h, :], k_s)
                T.copy(v[b, c * C : (c + 1) * C, h, column : column + block_V], v_s)
                for i in T.Parallel(C):
                    beta_s[i] = T.if_then_else(c * C + i < N, beta[b, c * C + i, h], 0.0)
                T.copy(state, state_s)
                _delta_inverse(k_s, beta_s, a, akk_s, akk_low, akk_low_s, t_s, t_rest_s)
                T.gemm(k_s, state_s, v_new, clear_accum=True)
                for i, j in T.Parallel(C, block_V):
                    v_new[i, j] = v_s[i, j] - v_new[i, j]
                T.copy(v_new, v_new_s)
                T.gemm(t_s, v_new_s, v_new, clear_accum=True)
                if split:
                    T.gemm(t_rest_s, v_new_s, v_new)
                T.copy(v_new, v_new_s)
                scores(q_s, k_s, a, aqk_s)
                T.gemm(q_s, state_s, out, clear_accum=True)
                T.gemm(aqk_s, v_new_s, out)
                store_chunk(out, out_s, o, b, c, h, column)
                T.gemm(k_s, v_new_s, state, transpose_A=True)

    return ladder_delta_seq_in_loop
