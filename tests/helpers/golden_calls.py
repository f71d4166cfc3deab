"""The golden's two forms side by side, and calls that bring out where they could part."""

from __future__ import annotations

from typing import Any

import torch

from kda.golden import chunk_kda_golden, inputs, recurrent_kda_golden, rel_rmse

LIMIT = {torch.float64: 1e-10, torch.float32: 1e-5}
RAGGED = [64, 1, 0, 130, 37, 0, 15]
PER_TOKEN = ("q", "k", "v", "g", "beta")


def check(call: dict[str, Any], dtype: torch.dtype = torch.float64, **options: Any) -> None:
    """The chunked form equals the recurrence within the dtype's limit."""
    actual, expected = chunk_kda_golden(**call, dtype=dtype, **options), recurrent_kda_golden(**call)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == dtype and a.shape == e.shape
        assert rel_rmse(a, e) <= LIMIT[dtype]


def ragged(generator: Any = inputs.raw, **options: Any) -> dict[str, Any]:
    """Packed sequences of all kinds of lengths, with more value heads than heads."""
    defaults = {"HV": 4, "V": 16, "lengths": RAGGED, "initial_state": True}
    return generator(1, sum(RAGGED), 2, 32, **(defaults | options))


def alone(call: dict[str, Any], n: int, start: int, length: int) -> dict[str, Any]:
    """The n-th sequence of a packed call as a call of its own, of fixed length."""
    own = {name: x for name, x in call.items() if name != "cu_seqlens"}
    own |= {name: call[name][:, start : start + length] for name in PER_TOKEN}
    return own | {"initial_state": call["initial_state"][n : n + 1]}
