"""dM1: decays, step sizes and norms once more, and the gradients back through them.

gate     bounded: g = l s, s = sigmoid(A x), x = raw + bias:   dx = dg l s (1 - s) A,     dA_log = Σ dx x
         softplus: g = -A softplus(x):                          dx = -dg A sigmoid(x),     dA_log = Σ dg g
beta     dlogit = dbeta beta (1 - s), with beta = s or 2 s
rows     of q and k, x̂ = r x with r = (Σ x² + eps)^(-1/2):      dx = r (dx̂ - x̂ (x̂ · dx̂));  q times the scale
"""

from typing import Any

import tilelang.language as T

from kda.golden.constants import CHUNK_SIZE as C
from kda.golden.constants import L2_NORM_EPS, L2_NORM_SHRINK, MIN_LOG_DECAY

from ..activation import LOG2E, log2_gate, sigmoid
from ..rows import LARGEST
from .scores import ROWS

MAX_LOG2 = 120.0
"""exp(-A x) is bounded by 2 to this: infinite, it would make NaN of the derivative of a gate that is shut."""

MAX_RATE = 2.0**63
"""A is bounded by this in that derivative, so that MAX_LOG2 makes it 0 whatever the rate."""


@T.macro
def load_gates(g: Any, t0: Any, rows: Any, hv: Any, raw_g: Any):
    """raw_g [ROWS, BLOCKS, K]: the raw gates, 0 past the end."""
    for r in T.unroll(ROWS):
        for b, c in T.Parallel(*raw_g.shape[1:]):
            raw_g[r, b, c] = T.if_then_else(b * ROWS + r < rows, g[t0 + b * ROWS + r, hv, c], T.cast(0, g.dtype))


@T.macro
def decays(
    raw_g: Any, rows: Any, bias: Any, A: Any, lower_bound: Any, use_gate: bool, bounded_gate: bool, a: Any,
    log2_block_s: Any,
):  # fmt: skip
    """a [ROWS, BLOCKS, K]: each row's decay, 1 past the end. log2_block_s [BLOCKS, K]: log2 of a whole block's."""
    shape = log2_block_s.shape
    log2_a = T.alloc_fragment(shape, "float32")
    log2_block = T.alloc_fragment(shape, "float32")
    T.clear(log2_block)
    for r in T.unroll(ROWS):
        for b, c in T.Parallel(*shape):
            log2_a[b, c] = raw_g[r, b, c]
            log2_a[b, c] = log2_gate(log2_a[b, c], bias[b, c], A, lower_bound, use_gate, bounded_gate)
            if use_gate:
                log2_a[b, c] = T.if_then_else(b * ROWS + r < rows, log2_a[b, c], 0.0)
            log2_block[b, c] = log2_block[b, c] + log2_a[b, c]
            a[r, b, c] = T.exp2(log2_a[b, c])
    for b, c in T.Parallel(*shape):
        log2_block_s[b, c] = log2_block[b, c]


@T.macro
def row_factors(
    qk_s: Any, beta: Any, t0: Any, rows: Any, hv: Any, scale: Any, use_qk_l2norm: bool, use_beta_sigmoid: bool,
    allow_neg_eigval: bool, row_s: Any,
):  # fmt: skip
    """row_s [C, 4], of each row: what q and what k are multiplied with, and beta, 0 past the end."""
    f32 = "float32"
    step = T.alloc_fragment((C,), f32)
    for i in T.Parallel(C):
        step[i] = T.cast(beta[t0 + T.min(i, rows - 1), hv], f32)
    for i in T.Parallel(C):
        if use_beta_sigmoid:
            step[i] = (2.0 if allow_neg_eigval else 1.0) * sigmoid(step[i])
        row_s[i, 2] = T.if_then_else(i < rows, step[i], 0.0)
    if use_qk_l2norm:
        squares = T.alloc_fragment(qk_s.shape, f32)
        factor = T.alloc_fragment((2 * C,), f32)
        for i, c in T.Parallel(*qk_s.shape):
            squares[i, c] = T.cast(qk_s[i, c], f32) * T.cast(qk_s[i, c], f32)
        T.reduce_sum(squares, factor, dim=1)
        for i in T.Parallel(2 * C):
            if factor[i] > LARGEST:  # rare: the sum once more, of a row that fp32 can square
                factor[i] = 0.0
                for c in T.serial(qk_s.shape[1]):
                    factor[i] = factor[i] + (L2_NORM_SHRINK * T.cast(qk_s[i, c], f32)) * (
                        L2_NORM_SHRINK * T.cast(qk_s[i, c], f32)
                    )
                factor[i] = L2_NORM_SHRINK * T.rsqrt(factor[i])
            else:
                factor[i] = T.rsqrt(factor[i] + L2_NORM_EPS)
        for i in T.Parallel(2 * C):
            row_s[i % C, i // C] = factor[i] * T.if_then_else(i < C, scale, 1.0)
    else:
        for i in T.Parallel(C):
            row_s[i, 0] = scale
            row_s[i, 1] = 1.0


@T.macro
def through_gate(
    raw_g: Any, t0: Any, rows: Any, hv: Any, bias: Any, A: Any, lower_bound: Any, use_gate: bool, bounded_gate: bool,
    flow: Any, total: Any, dg: Any, raw_sum: Any, rate_sum: Any,
):  # fmt: skip
    """Stores dg of the raw gate, from flow + total of the log decay and sums up its, and A_log's.

    raw_g is loaded before (load_gates), since a load here would wait for the store before it. The sums are there with
    the gate.
    """
    f32, shape = "float32", total.shape
    raw = T.alloc_fragment(shape, f32)
    d_raw = T.alloc_fragment(shape, f32)
    d_rate = T.alloc_fragment(shape, f32)
    s = T.alloc_fragment(shape, f32)
    low = T.alloc_fragment(shape, dg.dtype)
    if use_gate:
        T.clear(raw_sum)
        T.clear(rate_sum)
    for r in T.unroll(ROWS):
        for b, c in T.Parallel(*shape):
            raw[b, c] = raw_g[r, b, c]
            d_raw[b, c] = T.if_then_else(b * ROWS + r < rows, flow[r, b, c] + total[b, c], 0.0)
            if use_gate:
                raw[b, c] = raw[b, c] + bias[b, c]
                if bounded_gate:
                    # s (1 - s) = e s² with e = exp(-A x): 1 - s would lose it, where s is next to 1.
                    d_rate[b, c] = T.exp2(T.min(raw[b, c] * (-LOG2E * A), MAX_LOG2))
                    s[b, c] = 1.0 / (1.0 + d_rate[b, c])
                    d_raw[b, c] = (d_rate[b, c] * s[b, c]) * s[b, c] * (lower_bound * T.min(A, MAX_RATE)) * d_raw[b, c]
                    d_rate[b, c] = d_raw[b, c] * raw[b, c]
                else:
                    s[b, c] = log2_gate(raw[b, c], 0.0, A, 0.0, True, False)
                    d_raw[b, c] = T.if_then_else(s[b, c] < MIN_LOG_DECAY * LOG2E, 0.0, d_raw[b, c])
                    d_rate[b, c] = T.max(s[b, c], MIN_LOG_DECAY * LOG2E) * (1.0 / LOG2E) * d_raw[b, c]
                    d_raw[b, c] = -A * sigmoid(raw[b, c]) * d_raw[b, c]
                raw_sum[b, c] = raw_sum[b, c] + d_raw[b, c]
                rate_sum[b, c] = rate_sum[b, c] + d_rate[b, c]
            low[b, c] = d_raw[b, c]
        for b, c in T.Parallel(*shape):
            if b * ROWS + r < rows:
                dg[t0 + b * ROWS + r, hv, c] = low[b, c]


@T.macro
def through_norm(qk_s: Any, row_s: Any, kind: int, scale: Any, use_qk_l2norm: bool, d: Any):
    """d [C, K], the gradient of rows as the scores see them, becomes that of the raw rows; kind 0 is q, 1 is k."""
    if use_qk_l2norm:
        unit = T.alloc_fragment(d.shape, "float32")
        product = T.alloc_fragment(d.shape, "float32")
        dot = T.alloc_fragment((C,), "float32")
        for i, c in T.Parallel(*d.shape):
            unit[i, c] = T.cast(qk_s[kind * C + i, c], "float32") * (row_s[i, kind] * _inverse(scale, kind))
            product[i, c] = unit[i, c] * d[i, c]
        T.reduce_sum(product, dot, dim=1)
        for i, c in T.Parallel(*d.shape):
            d[i, c] = d[i, c] - unit[i, c] * dot[i]
    for i, c in T.Parallel(*d.shape):
        d[i, c] = d[i, c] * row_s[i, kind]


def _inverse(scale: Any, kind: int) -> Any:
    """What takes the scale out of a row's factor again; where that is 0, so is the gradient."""
    return T.if_then_else(scale == 0.0, 0.0, 1.0 / scale) if kind == 0 else 1.0


@T.macro
def store_rows(d: Any, t0: Any, rows: Any, hv: Any, dx: Any):
    """Rows of d [C, K] to dx [tokens, HV, K], but those past the end."""
    low = T.alloc_fragment(d.shape, dx.dtype)
    for i, c in T.Parallel(*d.shape):
        low[i, c] = d[i, c]
    for i, c in T.Parallel(*d.shape):
        if i < rows:
            dx[t0 + i, hv, c] = low[i, c]


@T.macro
def through_step(
    d: Any, qk_s: Any, row_s: Any, v_dot_ndb_s: Any, t0: Any, rows: Any, hv: Any, use_beta_sigmoid: bool,
    allow_neg_eigval: bool, dbeta: Any,
):  # fmt: skip
    """Stores dbeta = v · db + k · dk⁺, or that of its logit; d [C, K] is dk⁺."""
    product = T.alloc_fragment(d.shape, "float32")
    dot = T.alloc_fragment((C,), "float32")
    low = T.alloc_fragment((C,), dbeta.dtype)
    for i, c in T.Parallel(*d.shape):
        product[i, c] = d[i, c] * T.cast(qk_s[C + i, c], "float32")
    T.reduce_sum(product, dot, dim=1)
    for i in T.Parallel(C):
        dot[i] = dot[i] * row_s[i, 1] - v_dot_ndb_s[i]
        if use_beta_sigmoid:
            dot[i] = dot[i] * row_s[i, 2] * (1.0 - row_s[i, 2] * (0.5 if allow_neg_eigval else 1.0))
    for i in T.Parallel(C):
        low[i] = dot[i]
    for i in T.Parallel(C):
        if i < rows:
            dbeta[t0 + i, hv] = low[i]
