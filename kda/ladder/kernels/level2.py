"""Level 2, a decay for every head: level 1 with exp(g · distance) on every path from a token to a later one.

    O_c = diag(exp(g (i + 1))) Q_c S + (tril(Q_c K_cᵀ) ∘ exp(g (i - j))) V_c
    S <- exp(g 64) S + kgᵀ V_c        kg_j = exp(g (63 - j)) k_j

q, k [B, N, H, K]   v, o [B, N, H, V], dtype   g [H] fp32, log decay <= 0, from MIN_LOG_DECAY on taken as that. S in
fp32. No exponent is positive. What lies past the end of a sequence reads as zero, and no state is read after it.
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from kda.backends.tilelang.kernels.activation import LOG2E
from kda.golden.constants import CHUNK_SIZE as C
from kda.golden.constants import MIN_LOG_DECAY

from .tiles import store_chunk


def decay_seq_in_loop(*, K: int, V: int, dtype: str, block_V: int = 32, threads: int = 128, num_stages: int = 2) -> Any:
    """Kernel (q, k, v, g, o): a block owns block_V columns of a head's state and takes it along the sequence."""
    B, N, H = T.dynamic("B, N, H")

    @T.prim_func
    def ladder_decay_seq_in_loop(
        q: T.Tensor((B, N, H, K), dtype),
        k: T.Tensor((B, N, H, K), dtype),
        v: T.Tensor((B, N, H, V), dtype),
        g: T.Tensor((H,), "float32"),
        o: T.Tensor((B, N, H, V), dtype),
    ):
        with T.Kernel(V // block_V, H, B, threads=threads) as (tile, h, b):
            column = tile * block_V
            q_s = T.alloc_shared((C, K), dtype)
            k_s = T.alloc_shared((C, K), dtype)
            kg_s = T.alloc_shared((C, K), dtype)
            v_s = T.alloc_shared((C, block_V), dtype)
            state = T.alloc_fragment((K, block_V), "float32")
            state_s = T.alloc_shared((K, block_V), dtype)
            a = T.alloc_fragment((C, C), "float32")
            aqk_s = T.alloc_shared((C, C), dtype)
            out = T.alloc_fragment((C, block_V), "float32")
            out_s = T.alloc_shared((C, block_V), dtype)
            log2_decay = T.alloc_var("float32")
            T.annotate_layout({out_s: make_swizzled_layout(out_s)})

            log2_decay = LOG2E * T.max(g[h], MIN_LOG_DECAY)
            T.clear(state)
            for c in T.Pipelined(T.ceildiv(N, C), num_stages=num_stages):
                T.copy(q[b, c * C : (c + 1) * C, h, :], q_s)
                T.copy(k[b, c * C : (c + 1) * C, h, :], k_s)
                T.copy(v[b, c * C : (c + 1) * C, h, column : column + block_V], v_s)
                T.copy(state, state_s)
                T.gemm(q_s, k_s, a, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(C, C):
                    a[i, j] = T.if_then_else(j <= i, a[i, j] * T.exp2(log2_decay * (i - j)), 0.0)
                T.copy(a, aqk_s)
                T.gemm(q_s, state_s, out, clear_accum=True)
                for i, j in T.Parallel(C, block_V):
                    out[i, j] = out[i, j] * T.exp2(log2_decay * (i + 1))
                T.gemm(aqk_s, v_s, out)
                store_chunk(out, out_s, o, b, c, h, column)
                for i, d in T.Parallel(C, K):
                    kg_s[i, d] = k_s[i, d] * T.exp2(log2_decay * (C - 1 - i))
                for i, j in T.Parallel(K, block_V):
                    state[i, j] = state[i, j] * T.exp2(log2_decay * C)
                T.gemm(kg_s, v_s, state, transpose_A=True)

    return ladder_decay_seq_in_loop
