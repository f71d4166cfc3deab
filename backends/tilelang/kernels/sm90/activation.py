"""What one thread of the Hopper kernel does with its share of a tile: rows of 16 bits to fp32, and gates."""

from typing import Any

import tilelang.language as T

from kda.golden.constants import MIN_LOG_DECAY

from ..activation import LOG2E, MAX_LOG2_RATE

MAX_LOG2_BOUNDED_RATE = 100.0
"""The bounded gate's factor is multiplied out, A g + A dt_bias: neither may be infinite, lest their sum be NaN."""


@T.macro
def widen(raw: Any, x: Any):
    """x = raw in fp32. Of two bf16 in a word a shift and a mask make two fp32; the compiler would take three steps.

    One `raw` may be widened at one place of a kernel only: TileLang doesn't know that the view is the same memory, and
    takes what another place has read from it for still valid.
    """
    n = raw.shape[0]
    if raw.dtype == "bfloat16" and n % 2 == 0:
        word = T.view(raw, (n // 2,), "uint32")
        for i in T.unroll(n // 2):
            x[2 * i] = T.reinterpret(word[i] << 16, "float32")
            x[2 * i + 1] = T.reinterpret(word[i] & T.uint32(0xFFFF0000), "float32")
    else:
        for i in T.vectorized(n):
            x[i] = T.cast(raw[i], "float32")


def sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + T.exp2(-LOG2E * x))


def log2_softplus(x: Any) -> Any:
    """log2(1 + exp(x)) = log2(e) softplus(x), without a branch; a series where 1 + exp(x) would round exp(x) away."""
    y = LOG2E * x
    e = T.exp2(T.min(y, 30.0))
    series = LOG2E * e * (1.0 - e * (0.5 - e * (1.0 / 3.0)))
    return T.max(y, T.Select(y < -6.0, series, T.log2(1.0 + e)))


def gate_factor(A_log: Any, hv: Any, bounded: bool) -> Any:
    """What `log2_decay` multiplies with, once per block."""
    largest = MAX_LOG2_BOUNDED_RATE if bounded else MAX_LOG2_RATE
    return (-LOG2E if bounded else -1.0) * T.exp2(T.min(LOG2E * A_log[hv], largest))


def gate_bias(factor: Any, dt_bias: Any, bounded: bool) -> Any:
    """What `log2_decay` adds, once per channel: the bounded gate's factor is multiplied out."""
    return factor * dt_bias if bounded else dt_bias


def log2_decay(g: Any, use_gate: bool, bounded: bool, factor: Any, bias: Any, lower_bound: Any) -> Any:
    """log2 of a token's decay; at least MIN_LOG_DECAY nats, which changes nothing in fp32 and keeps sums finite."""
    if bounded:
        return LOG2E * lower_bound * (1.0 / (1.0 + T.exp2(g * factor + bias)))
    if use_gate:
        return T.max(factor * log2_softplus(g + bias), LOG2E * MIN_LOG_DECAY)
    return LOG2E * T.max(g, MIN_LOG_DECAY)
