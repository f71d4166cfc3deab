"""The torch backend's gradients: those of finite differences, and right at every gate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_calls import GATES, assert_same_bits, leaves, run

from kda.backends.torch import chunk
from kda.golden import inputs

pytestmark = pytest.mark.usefixtures("one_thread")


SMALL: list[dict[str, Any]] = [
    inputs.stable(1, 9, 1, 2, 1, 2, lengths=[0, 5, 1, 2], dtype=torch.float64, initial_state=True),
    inputs.raw(1, 8, 1, 2, 1, 2, lengths=[3, 5], dtype=torch.float64, initial_state=True, state_v_first=False),
    inputs.raw(2, 5, 1, 2, 1, lower_bound=-5.0, allow_neg_eigval=True, dtype=torch.float64, initial_state=True),
]


@pytest.mark.parametrize("call", SMALL, ids=["varlen", "gate", "bounded"])
def test_gradcheck(call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "CHUNK_SIZE", 4)
    x = leaves(call, torch.float64)
    assert torch.autograd.gradcheck(lambda *tensors: run(call | dict(zip(x, tensors, strict=True))), tuple(x.values()))


def gradients(call: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradients of a fixed random functional of o and the final state."""
    x = leaves(call, dtype)
    generator = torch.Generator().manual_seed(7)
    results = run(call | x)
    sum((r * torch.randn(r.shape, generator=generator).to(dtype)).sum() for r in results).backward()
    return {name: tensor.grad for name, tensor in x.items()}


def saturated(A_log: float) -> dict[str, Any]:
    call = inputs.raw(1, 130, 2, 16, dtype=torch.float32, initial_state=True)
    return call | {"A_log": torch.full((2,), A_log)}


@pytest.mark.parametrize(
    "call",
    [inputs.stable(1, 130, 2, 16, gate=gate, dtype=torch.float32, initial_state=True) for gate in GATES]
    + [saturated(10.0), saturated(60.0), saturated(1000.0)]
    + [inputs.raw(1, 130, 2, 16, lower_bound=-5.0, dtype=torch.float32) | {"A_log": torch.full((2,), 1000.0)}],
    ids=[*map(str, GATES), "A_log 10", "A_log 60", "A_log 1000", "bounded, A_log 1000"],
)
def test_gradients_are_right_at_every_gate(call: dict[str, Any]) -> None:
    expected = gradients(call, torch.float64)
    for name, actual in gradients(call, torch.float32).items():
        assert actual.isfinite().all(), name
        error = (actual - expected[name]).norm()
        assert error <= 1e-5 * expected[name].norm() + 1e-12, name


def test_autocast_does_not_reach_in() -> None:
    call = inputs.stable(1, 100, 2, 16, dtype=torch.float32)
    call |= leaves(call, torch.float32)
    expected = run(call)
    with torch.autocast("cpu", torch.bfloat16):
        results = run(call)
    assert_same_bits(results, expected)
    (grad,) = torch.autograd.grad(results[0].sum(), call["q"])
    assert torch.equal(grad, torch.autograd.grad(expected[0].sum(), call["q"])[0])
