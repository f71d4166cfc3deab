"""What the kernels of several levels do with a chunk's tiles."""

from typing import Any

import tilelang.language as T

from kda.golden.constants import CHUNK_SIZE as C


@T.macro
def scores(q_s: Any, k_s: Any, a: Any, aqk_s: Any):
    """aqk_s [64, 64] = tril(q kᵀ); a is its fragment in fp32. No exponential follows, so the mask is 0 and not -inf."""
    T.gemm(q_s, k_s, a, transpose_B=True, clear_accum=True)
    for i, j in T.Parallel(C, C):
        a[i, j] = T.if_then_else(j <= i, a[i, j], 0.0)
    T.copy(a, aqk_s)


@T.macro
def store_chunk(out: Any, out_s: Any, o: Any, b: Any, c: Any, h: Any, column: Any):
    """Rows of chunk c to o [B, N, H, V], columns from `column` on; rows past N have no place there and are dropped."""
    T.copy(out, out_s)
    T.copy(out_s, o[b, c * C : (c + 1) * C, h, column : column + out_s.shape[1]], disable_tma=True)
