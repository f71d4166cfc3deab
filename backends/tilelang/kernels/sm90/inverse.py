"""M2, the inverse: Ainv diag(beta), Ainv = (I + Akk)⁻¹, of a chunk of 64 rows in four blocks of 16, by four warps.

Each warp inverts one diagonal block by forward substitution in fp32, a column a lane. From X (I + Akk) = I for X = Ainv
the block columns follow from the last to the first:  X_rc = -(Σ_{c < l <= r} X_rl Akk_lc) X_cc.  Row block r of X
belongs to warp r and never leaves its registers: it is the left operand of these products, in fp16, and then of w's and
u's, in the dtype.
"""

from typing import Any

import tilelang.language as T

from kda.golden.constants import CHUNK_SIZE as C
from kda.golden.constants import SUB_BLOCK as SUB


@T.macro
def invert_diagonal_blocks(below_s: Any, inverse_s: Any):
    """inverse_s[b] = (I + Akk_bb)⁻¹; below_s[b, j, i] = Akk_bb[i, j] for j < i, and 0 for j >= i."""
    warp = T.get_thread_binding() // 32
    lane = T.get_thread_binding() % 32
    x = T.alloc_local((SUB,), "float32")
    a = T.alloc_local((4,), "float32")
    if lane < SUB:
        for i in T.unroll(SUB):
            x[i] = T.if_then_else(i == lane, 1.0, 0.0)
        for j in T.unroll(SUB):
            # Stored as soon as it is final, so that inverse_s can't be given the memory of below_s.
            inverse_s[warp, j, lane] = T.cast(x[j], inverse_s.dtype)
            for i in T.unroll(SUB // 4):
                if i * 4 + 3 > j:
                    for e in T.vectorized(4):
                        a[e] = below_s[warp, j, i * 4 + e]
                    for e in T.unroll(4):
                        x[i * 4 + e] = x[i * 4 + e] - a[e] * x[j]


@T.macro
def inverse_times_beta(inverse_s: Any, akk_s: Any, beta_s: Any, step: Any, rest: Any, ainv: Any):
    """step, two fragments [64, 32]: Ainv diag(beta), rounded to their dtype. rest, likewise: what that lost. ainv,
    likewise or None: Ainv. akk_s[c] is Akk's block column c [64, 16], used below the diagonal block."""
    f32, f16 = "float32", "float16"
    sum_f = T.alloc_fragment((C, SUB), f32)
    sum_h = T.alloc_fragment((C, SUB), f16)
    column = T.alloc_fragment((C, SUB), f32)
    column_1 = T.alloc_fragment((C, SUB), f16)
    column_2 = T.alloc_fragment((C, SUB), f16)
    column_3 = T.alloc_fragment((C, SUB), f16)
    columns = (None, column_1, column_2, column_3)
    for c in (3, 2, 1, 0):
        for i, j in T.Parallel(C, SUB):
            column[i, j] = T.if_then_else(i // SUB == c, T.cast(inverse_s[c, i % SUB, j], f32), 0.0)
        if c < 3:
            for r in (3, 2, 1)[: 3 - c]:
                T.wgmma_gemm(columns[r], akk_s[c, r * SUB : r * SUB + SUB, :], sum_f, clear_accum=r == 3)
            T.wait_wgmma(0)
            for i, j in T.Parallel(C, SUB):
                sum_h[i, j] = T.cast(-sum_f[i, j], f16)
            T.wgmma_gemm(sum_h, inverse_s[c, :, :], column)
            T.wait_wgmma(0)
        if c > 0:
            T.copy(column, columns[c])
        if ainv is not None:
            for i, j in T.Parallel(C, SUB):
                ainv[c // 2][i, c % 2 * SUB + j] = T.cast(column[i, j], ainv[0].dtype)
        for i, j in T.Parallel(C, SUB):
            column[i, j] = column[i, j] * beta_s[c * SUB + j]
        for i, j in T.Parallel(C, SUB):
            step[c // 2][i, c % 2 * SUB + j] = T.cast(column[i, j], step[0].dtype)
        for i, j in T.Parallel(C, SUB):
            rest[c // 2][i, c % 2 * SUB + j] = T.cast(
                column[i, j] - T.cast(step[c // 2][i, c % 2 * SUB + j], f32), rest[0].dtype
            )
