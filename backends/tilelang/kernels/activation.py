"""M1's element-wise formulas as macros: the gate in log2 units and beta. Scalars in, scalars out, all in fp32."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

LOG2E = 1.4426950408889634
"""log2(e): exp(x) = exp2(LOG2E * x), and exp2 is what the hardware has."""

MAX_LOG2_RATE = 126.0
"""exp(A_log) is bounded by 2 to this: an infinite rate would make NaN of a softplus that is 0."""

_SERIES_BELOW = 2.0**-6
_LINEAR_ABOVE = 20.0


@T.macro
def sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + T.exp2(-LOG2E * x))


@T.macro
def log2_softplus_gate(g: Any, dt_bias: Any, A: Any) -> Any:
    """-A * softplus(g + dt_bias) * log2(e), with A = exp(A_log).

    log2(1 + e) loses a small e = exp(g + dt_bias) to rounding, and weak gates act through thousands of tokens: a
    three-term series takes over there.
    """
    x = LOG2E * (g + dt_bias)
    e = T.exp2(x)
    series = LOG2E * e * (1.0 - e * (0.5 - e * (1.0 / 3.0)))
    return -A * T.if_then_else(x > LOG2E * _LINEAR_ABOVE, x, T.if_then_else(e < _SERIES_BELOW, series, T.log2(1.0 + e)))


@T.macro
def log2_bounded_gate(g: Any, dt_bias: Any, A: Any, lower_bound: Any) -> Any:
    """lower_bound * sigmoid(A * (g + dt_bias)) * log2(e), with A = exp(A_log)."""
    return LOG2E * lower_bound * sigmoid(A * (g + dt_bias))


@T.macro
def rate(A_log: Any, hv: Any, use_gate: bool) -> Any:
    """A = exp(A_log) of a head, 1 without the gate."""
    return T.exp2(T.min(LOG2E * A_log[hv], MAX_LOG2_RATE)) if use_gate else 1.0


@T.macro
def log2_gate(g: Any, dt_bias: Any, A: Any, lower_bound: Any, use_gate: bool, bounded_gate: bool) -> Any:
    """log2 of a token's decay, of whichever form."""
    if bounded_gate:
        return log2_bounded_gate(g, dt_bias, A, lower_bound)
    if use_gate:
        return log2_softplus_gate(g, dt_bias, A)
    return LOG2E * g
