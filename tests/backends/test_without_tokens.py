"""Calls without tokens: the registry answers them for every backend, and no backend ever sees one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_backends import FakeBackend
from torch import Tensor

import kda
from kda.backends.call import KdaCall
from kda.golden import inputs


class Failing(FakeBackend):
    """It takes every call, and fails at it."""

    differentiable = False

    def run(self, call: KdaCall) -> tuple[Tensor, Tensor | None]:
        pytest.fail("a call without tokens reached a backend")


OPERATORS = pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])


@pytest.fixture(autouse=True)
def failing(register: Callable[..., Failing]) -> Failing:
    """A backend `failing`."""
    return register("failing", Failing())


def empty(**options: Any) -> dict[str, Any]:
    """No tokens, of two sequences with a state each."""
    return inputs.stable(1, 0, 2, 8, 4, lengths=[0, 0], initial_state=True, **options)


@OPERATORS
@pytest.mark.parametrize("call", [empty(), empty(state_v_first=False), inputs.stable(3, 0, 1, 8, initial_state=True)])
def test_the_states_are_those_that_came_and_memory_of_their_own(operator, call) -> None:
    start = call["initial_state"]
    o, state = operator(**call, backend="failing")
    assert o.shape == call["v"].shape and o.dtype == call["v"].dtype
    assert torch.equal(state, start) and state.data_ptr() != start.data_ptr() and state.is_contiguous()
    assert operator(**call | {"output_final_state": False}, backend="failing")[1] is None


@OPERATORS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_without_states_they_are_zeros(operator, dtype) -> None:
    call = empty(dtype=dtype) | {"initial_state": None}
    _, state = operator(**call, backend="failing")
    assert state.shape == (2, 2, 4, 8) and not state.any()
    assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@OPERATORS
def test_an_empty_batch(operator) -> None:
    o, state = operator(**inputs.stable(0, 5, 2, 8, 4), backend="failing")
    assert o.shape == (0, 5, 2, 4) and state.shape == (0, 2, 4, 8)


def test_states_of_a_pool() -> None:
    call = empty(dtype=torch.float32)
    start = call["initial_state"].clone()
    _, state = kda.fused_recurrent_kda(**call, ssm_state_indices=torch.tensor([1, 0]), backend="failing")
    assert torch.equal(state[0], start[1]) and not state[1].any()
    slots = torch.tensor([[1, 0], [0, 1]])
    _, states = kda.fused_recurrent_kda(**call, ssm_state_indices=slots, backend="failing")
    assert states.shape == (0, 2, 4, 8), "a row for every token"


@pytest.mark.parametrize("slots", [None, [1, 0], [[1, 0], [0, 1]]])
def test_in_place_the_states_stay_as_they_are(slots) -> None:
    call = empty(dtype=torch.float32)
    before = call["initial_state"].clone()
    if slots:
        call |= {"ssm_state_indices": torch.tensor(slots)}
    _, state = kda.fused_recurrent_kda(**call, inplace_final_state=True, backend="failing")
    assert state is call["initial_state"] and torch.equal(state, before)


@OPERATORS
def test_the_states_gradient_passes_through(operator) -> None:
    call = empty(dtype=torch.float32)
    call["initial_state"].requires_grad_()
    operator(**call, backend="failing")[1].sum().backward()
    assert (call["initial_state"].grad == 1).all()


@OPERATORS
def test_it_is_refused_all_the_same_what_the_backend_does_not_take(operator, failing) -> None:
    failing.refusals.append("K must be 64, got 8")
    with pytest.raises(NotImplementedError, match="K must be 64, got 8"):
        operator(**empty(), backend="failing")
