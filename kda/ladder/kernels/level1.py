"""Level 1, linear attention, by two kernels that differ in one thing: whether the sequence is in the grid.

    O_c = Q_c S_c + tril(Q_c K_cᵀ) V_c        S_c = Σ_{c' < c} K_c'ᵀ V_c'

q, k [B, N, H, K]   v, o [B, N, H, V], dtype; S in fp32, rounded to dtype to be multiplied. Any N: what lies past the
end of a sequence reads as zero. `linattn_chunk` mirrors form C of the reference, `linattn_seq_in_loop` form D.
"""

from typing import Any

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from kda.golden.constants import CHUNK_SIZE as C

from .tiles import scores, store_chunk


def linattn_chunk(*, K: int, V: int, dtype: str, threads: int = 128, num_stages: int = 2) -> Any:
    """Kernel (q, k, v, o): a block owns a chunk. Blocks cannot wait for each other, so each of them sums up the state
    before its chunk anew: N²/(2·64) products of 64 rows a head where N would do."""
    B, N, H = T.dynamic("B, N, H")

    @T.prim_func
    def ladder_linattn_chunk(
        q: T.Tensor((B, N, H, K), dtype),
        k: T.Tensor((B, N, H, K), dtype),
        v: T.Tensor((B, N, H, V), dtype),
        o: T.Tensor((B, N, H, V), dtype),
    ):
        with T.Kernel(T.ceildiv(N, C), H, B, threads=threads) as (block, h, b):
            k_s = T.alloc_shared((C, K), dtype)
            v_s = T.alloc_shared((C, V), dtype)
            state = T.alloc_fragment((K, V), "float32")
            state_s = T.alloc_shared((K, V), dtype)
            q_own_s = T.alloc_shared((C, K), dtype)
            k_own_s = T.alloc_shared((C, K), dtype)
            v_own_s = T.alloc_shared((C, V), dtype)
            a = T.alloc_fragment((C, C), "float32")
            aqk_s = T.alloc_shared((C, C), dtype)
            out = T.alloc_fragment((C, V), "float32")
            out_s = T.alloc_shared((C, V), dtype)
            T.annotate_layout({out_s: make_swizzled_layout(out_s)})

            T.clear(state)
            for c in T.Pipelined(block, num_stages=num_stages):
                T.copy(k[b, c * C : (c + 1) * C, h, :], k_s)
                T.copy(v[b, c * C : (c + 1) * C, h, :], v_s)
                T.gemm(k_s, v_s, state, transpose_A=True)
            T.copy(state, state_s)

            # Tiles of their own: what the loop's hold after it depends on the pipeline's depth.
            T.copy(q[b, block * C : (block + 1) * C, h, :], q_own_s)
            T.copy(k[b, block * C : (block + 1) * C, h, :], k_own_s)
            T.copy(v[b, block * C : (block + 1) * C, h, :], v_own_s)
            scores(q_own_s, k_own_s, a, aqk_s)
            T.gemm(q_own_s, state_s, out, clear_accum=True)
            T.gemm(aqk_s, v_own_s, out)
            store_chunk(out, out_s, o, b, block, h, 0)

    return ladder_linattn_chunk


def linattn_seq_in_loop(
    *, K: int, V: int, dtype: str, block_V: int = 32, threads: int = 128, num_stages: int = 2
) -> Any:
    """Kernel (q, k, v, o): a block owns block_V columns of a head's state and takes it along the sequence."""
    B, N, H = T.dynamic("B, N, H")

    @T.prim_func
    def ladder_linattn_seq_in_loop(
        q: T.Tensor((B, N, H, K), dtype),
        k: T.Tensor((B, N, H, K), dtype),
        v: T.Tensor((B, N, H, V), dtype),
        o: T.Tensor((B, N, H, V), dtype),
    ):
        with T.Kernel(V // block_V, H, B, threads=threads) as (tile, h, b):
            column = tile * block_V
            q_s = T.alloc_shared((C, K), dtype)
            k_s = T.alloc_shared((C, K), dtype)
            v_s = T.alloc_shared((C, block_V), dtype)
            state = T.alloc_fragment((K, block_V), "float32")
            state_s = T.alloc_shared((K, block_V), dtype)
            a = T.alloc_fragment((C, C), "float32")
            aqk_s = T.alloc_shared((C, C), dtype)
            out = T.alloc_fragment((C, block_V), "float32")
            out_s = T.alloc_shared((C, block_V), dtype)
            T.annotate_layout({out_s: make_swizzled_layout(out_s)})

            T.clear(state)
            for c in T.Pipelined(T.ceildiv(N, C), num_stages=num_stages):
                T.copy(q[b, c * C : (c + 1) * C, h, :], q_s)
                T.copy(k[b, c * C : (c + 1) * C, h, :], k_s)
                T.copy(v[b, c * C : (c + 1) * C, h, column : column + block_V], v_s)
                T.copy(state, state_s)
                scores(q_s, k_s, a, aqk_s)
                T.gemm(q_s, state_s, out, clear_accum=True)
                T.gemm(aqk_s, v_s, out)
                store_chunk(out, out_s, o, b, c, h, column)
                # Last, so that a chunk reads the state before it: this order is the right shift of the prefix sums.
                T.gemm(k_s, v_s, state, transpose_A=True)

    return ladder_linattn_seq_in_loop
