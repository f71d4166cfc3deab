"""The torch backend's chunk_kda against the fp64 token recurrence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kda
from kda import golden
from kda.golden import rel_rmse

FP32_LIMIT = 1e-5
GATES = ["logsigmoid", -1.5, -2.0, -5.0, 0.0, -1e-3, -1000.0, -torch.inf, "half_1000", "mixed"]
LENGTHS = [0, 5, 64, 130, 0, 1, 63, 65, 16]


def run(call: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    return kda.chunk_kda(**call, backend="torch")


def assert_matches_recurrence(call: dict[str, Any], limit: float = FP32_LIMIT) -> None:
    o, state = run(call)
    o_ref, state_ref = golden.recurrent_kda_golden(**call)
    assert o.dtype == call["v"].dtype and o.shape == call["v"].shape
    assert state.dtype == (torch.float64 if o.dtype == torch.float64 else torch.float32)
    assert rel_rmse(o, o_ref) <= limit and rel_rmse(state, state_ref) <= limit


def assert_same_bits(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


def leaves(call: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies of the call's floating-point tensors that require grad."""
    return {
        name: x.to(dtype).detach().clone().requires_grad_()
        for name, x in call.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
