"""M1's element-wise formulas as macros: the gate in log2 units and beta. Scalars in, scalars out, all in fp32."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

LOG2E = 1.4426950408889634
"""log2(e): exp(x) = exp2(LOG2E * x), and exp2 is what the hardware has."""

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
