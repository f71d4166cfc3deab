"""M2, the inverse: Ainv = (I + Akk)⁻¹ of a chunk, and Ainv diag(beta).

From Akk's two diagonal 32 x 32 blocks and the block below them: the diagonal blocks by forward substitution in fp32, a
column a thread; the block below by the product -X₁ Akk₁₀ X₀ of fp16 operands, whose rounding is far below that of the
results in 16 bits.
"""

from typing import Any

import tilelang.language as T

from .scores import HALF


@T.macro
def _invert_diagonal_blocks(akk_s: Any, x: Any, pivot: Any):
    """x[:, b, :] = (I + Akk_b)⁻¹; akk_s [2, 32, 32] holds what is below the diagonals."""
    for i in T.unroll(HALF):
        for b, c in T.Parallel(2, HALF):
            x[i, b, c] = T.if_then_else(i == c, 1.0, 0.0)
    for j in T.unroll(HALF - 1):
        for b, c in T.Parallel(2, HALF):
            pivot[b, c] = x[j, b, c]
        for i in T.unroll(HALF - 1 - j):
            for b, c in T.Parallel(2, HALF):
                x[j + 1 + i, b, c] = x[j + 1 + i, b, c] - akk_s[b, j + 1 + i, j] * pivot[b, c]


@T.macro
def inverse_times_beta(akk_s: Any, akk_low_s: Any, beta_s: Any, step_s: Any, rest_s: Any, ainv_s: Any):
    """step_s [64, 64] = Ainv diag(beta) rounded to its dtype, rest_s what that lost (None where it is exact); ainv_s
    (or None) = Ainv."""
    x = T.alloc_fragment((HALF, 2, HALF), "float32")
    pivot = T.alloc_fragment((2, HALF), "float32")
    x_s = T.alloc_shared((2 * HALF, HALF), akk_low_s.dtype)
    low = T.alloc_fragment((HALF, HALF), "float32")
    low_s = T.alloc_shared((HALF, HALF), akk_low_s.dtype)
    _invert_diagonal_blocks(akk_s, x, pivot)
    for i in T.unroll(HALF):
        for b, c in T.Parallel(2, HALF):
            x_s[b * HALF + i, c] = x[i, b, c]
    T.gemm(akk_low_s, x_s[0:HALF, :], low, clear_accum=True)
    T.copy(low, low_s)
    T.gemm(x_s[HALF : 2 * HALF, :], low_s, low, clear_accum=True)
    for i in T.unroll(HALF):
        for b, c in T.Parallel(2, HALF):
            if ainv_s is not None:
                ainv_s[b * HALF + i, b * HALF + c] = x[i, b, c]
            x[i, b, c] = x[i, b, c] * beta_s[b * HALF + c]
            step_s[b * HALF + i, b * HALF + c] = x[i, b, c]
            if rest_s is not None:
                rest_s[b * HALF + i, b * HALF + c] = x[i, b, c] - T.cast(T.cast(x[i, b, c], step_s.dtype), "float32")
    for i, j in T.Parallel(HALF, HALF):
        if ainv_s is not None:
            ainv_s[HALF + i, j] = -low[i, j]
            ainv_s[i, HALF + j] = 0.0
        low[i, j] = -low[i, j] * beta_s[j]
        step_s[HALF + i, j] = low[i, j]
        step_s[i, HALF + j] = 0.0
        if rest_s is not None:
            rest_s[HALF + i, j] = low[i, j] - T.cast(T.cast(low[i, j], step_s.dtype), "float32")
            rest_s[i, HALF + j] = 0.0
