"""M1's rows: tiles of a chunk's tokens, zero past the sequence's end, and the L2 norms of q and k."""

from typing import Any

import tilelang.language as T

from kda.golden.constants import CHUNK_SIZE as C
from kda.golden.constants import L2_NORM_EPS, L2_NORM_SHRINK

_TINY = 1e-30
LARGEST = 3e38
"""A sum of squares beyond this is infinite, or nearly so."""


@T.macro
def load_rows(source: Any, t0: Any, rows: Any, head: Any, tile: Any):
    """tile [64, dim] = tokens t0, t0 + 1, ... of source [T, heads, dim], and 0 behind the last of the rows."""
    for i, c in T.Parallel(*tile.shape):
        tile[i, c] = T.if_then_else(i < rows, source[t0 + i, head, c], T.cast(0, tile.dtype))


@T.macro
def _row_squares(x: Any, product: Any, total: Any, shrink: Any):
    """total [64] = Σ (shrink x)² of each row; shrink [64] is 1, or L2_NORM_SHRINK where Σ x² is beyond fp32."""
    for i, c in T.Parallel(*x.shape):
        product[i, c] = T.cast(x[i, c], "float32") * T.cast(x[i, c], "float32")
    T.reduce_sum(product, total, dim=1)
    for i in T.Parallel(C):
        shrink[i] = T.if_then_else(total[i] > LARGEST, L2_NORM_SHRINK, 1.0)
    for i, c in T.Parallel(*x.shape):
        product[i, c] = (T.cast(x[i, c], "float32") * shrink[i]) * (T.cast(x[i, c], "float32") * shrink[i])
    T.reduce_sum(product, total, dim=1)


@T.macro
def unit_rows(
    q: Any, k: Any, t0: Any, rows: Any, head: Any, q_s: Any, k_s: Any, q_norm: Any, k_norm: Any, q_dot_k: Any
):
    """q_s, k_s [64, K] = rows of length 1 (0 for 0), and q_dot_k [64] = q · k of each row.

    With q_norm and k_norm [64], the lengths go there and q_dot_k is that of the rows as they came; without (None), the
    unit rows are what is meant: x / sqrt(Σ x² + eps).
    """
    q_in = T.alloc_fragment(q_s.shape, q.dtype)
    k_in = T.alloc_fragment(k_s.shape, k.dtype)
    product = T.alloc_fragment(q_s.shape, "float32")
    q_shrink = T.alloc_fragment((C,), "float32")
    k_shrink = T.alloc_fragment((C,), "float32")
    qq = T.alloc_fragment((C,), "float32")
    kk = T.alloc_fragment((C,), "float32")
    qk = T.alloc_fragment((C,), "float32")
    load_rows(q, t0, rows, head, q_in)
    load_rows(k, t0, rows, head, k_in)
    _row_squares(q_in, product, qq, q_shrink)
    _row_squares(k_in, product, kk, k_shrink)
    for i, c in T.Parallel(*q_s.shape):
        product[i, c] = (T.cast(q_in[i, c], "float32") * q_shrink[i]) * (T.cast(k_in[i, c], "float32") * k_shrink[i])
    T.reduce_sum(product, qk, dim=1)
    for i in T.Parallel(C):
        if q_norm is None:
            qq[i] = T.rsqrt(qq[i] + T.if_then_else(q_shrink[i] < 1.0, 0.0, L2_NORM_EPS))
            kk[i] = T.rsqrt(kk[i] + T.if_then_else(k_shrink[i] < 1.0, 0.0, L2_NORM_EPS))
            q_dot_k[i] = qk[i] * (qq[i] * kk[i])
        else:
            q_norm[i] = T.sqrt(qq[i]) / q_shrink[i]
            k_norm[i] = T.sqrt(kk[i]) / k_shrink[i]
            qq[i] = T.rsqrt(T.max(qq[i], _TINY))
            kk[i] = T.rsqrt(T.max(kk[i], _TINY))
            q_dot_k[i] = qk[i] / q_shrink[i] / k_shrink[i]
    for i, c in T.Parallel(*q_s.shape):
        q_s[i, c] = (T.cast(q_in[i, c], "float32") * q_shrink[i]) * qq[i]
    for i, c in T.Parallel(*k_s.shape):
        k_s[i, c] = (T.cast(k_in[i, c], "float32") * k_shrink[i]) * kk[i]
