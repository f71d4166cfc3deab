"""The gradient of a backend that has none: torch computes the call anew, and autograd sees what kernels do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_backends import WithoutBackward
from torch import Tensor

import kda
from kda.backends.call import DIFFERENTIABLE
from kda.golden import inputs


@pytest.fixture(autouse=True)
def kernels(register: Callable[..., WithoutBackward]) -> WithoutBackward:
    """A backend `kernels` without a backward pass."""
    return register("kernels", WithoutBackward())


def gradients(operator: Callable[..., Any], call: dict[str, Any], backend: str) -> dict[str, Tensor]:
    call = {n: x.clone().requires_grad_() if n in DIFFERENTIABLE else x for n, x in call.items()}
    o, state = operator(**call, backend=backend)
    loss = (o * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum()
    (loss if state is None else loss + state.square().sum()).backward()
    return {name: call[name].grad for name in DIFFERENTIABLE if isinstance(call.get(name), Tensor)}


@pytest.mark.parametrize("options", [{"lengths": [3, 0, 67]}, {"lower_bound": -5.0}])
@pytest.mark.parametrize("output_final_state", [True, False])
@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_a_backend_without_backward_gets_torchs_gradient(options, output_final_state, operator):
    call = inputs.raw(1, 70, 2, 16, 8, 4, dtype=torch.float32, initial_state=True, **options)
    call["output_final_state"] = output_final_state
    expected, actual = (gradients(operator, call, backend) for backend in ("torch", "kernels"))
    assert set(actual) == set(DIFFERENTIABLE)
    for name, gradient in expected.items():
        assert gradient.any(), name
        torch.testing.assert_close(actual[name], gradient)


@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_second_derivatives(operator):
    call = inputs.stable(1, 3, 1, 2, 1, dtype=torch.float64, initial_state=True)
    x = {name: call[name].double().requires_grad_() for name in ("q", "k", "v", "g", "beta", "initial_state")}
    run = lambda *values: operator(**call | dict(zip(x, values, strict=True)), backend="kernels")  # noqa: E731
    assert torch.autograd.gradgradcheck(run, tuple(x.values()))


@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_a_call_without_tokens_passes_its_states_gradient_on(operator):
    call = inputs.stable(1, 0, 1, 4, dtype=torch.float32, initial_state=True)
    call["initial_state"].requires_grad_()
    operator(**call, backend="kernels")[1].sum().backward()
    assert (call["initial_state"].grad == 1).all()


def test_one_tensor_in_two_places_gets_both_gradients():
    found = []
    for backend in ("torch", "kernels"):
        call = inputs.stable(1, 5, 1, 4, dtype=torch.float32)
        call["q"] = call["k"] = call["k"].requires_grad_()
        kda.chunk_kda(**call, backend=backend)[0].sum().backward()
        found.append(call["k"].grad)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("packed", [False, True])
def test_the_output_can_be_modified_in_place(packed):
    call = inputs.stable(1, 5, 1, 4, dtype=torch.float32, lengths=[5] if packed else None)
    if packed:
        call |= {name: call[name][0] for name in ("q", "k", "v", "g", "beta")}
    call["v"] = call["v"].requires_grad_()
    o, _ = kda.chunk_kda(**call, backend="kernels")
    o += 1
    o.sum().backward()
    assert call["v"].grad.any()


def test_autograd_sees_that_a_kernel_has_written_a_state():
    call = inputs.stable(1, 2, 1, 4, dtype=torch.float32, initial_state=True)
    factor = torch.ones_like(call["initial_state"]).requires_grad_()
    y = (call["initial_state"] * factor).sum()
    kda.fused_recurrent_kda(**call, inplace_final_state=True, backend="kernels")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_only_the_gradients_asked_for_are_computed():
    call = inputs.stable(1, 20, 1, 16, dtype=torch.float32)
    call["v"].requires_grad_()
    kda.chunk_kda(**call, backend="kernels")[0].sum().backward()
    assert call["v"].grad.any() and call["q"].grad is None
