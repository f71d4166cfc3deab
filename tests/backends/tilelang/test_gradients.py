"""Gradients of chunk_kda by the TileLang kernels, through autograd and on the CPU, against the fp64 golden."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kda
from kda import backends
from kda.backends.call import DIFFERENTIABLE
from kda.checks import checked
from kda.golden import chunk_kda_backward_golden, inputs, rel_rmse

pytest.importorskip("tilelang")

LIMIT = 3e-6
"""Relative RMSE in float32."""

LENGTHS = [70, 0, 30]


@pytest.fixture(autouse=True)
def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_EMULATE", "1")


def packed(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Rank 3, with an empty sequence, padding and two value heads to a head."""
    call = inputs.raw(1, 110, 1, 64, HV=2, lengths=LENGTHS, lower_bound=-5.0, dtype=dtype, initial_state=True)
    return call | {name: call[name][0] for name in ("q", "k", "v", "g", "beta")}


def outer(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Gradients that o and the final state are given."""
    generator = torch.Generator().manual_seed(1)
    d_o, d_state = (torch.randn(call[name].shape, generator=generator) for name in ("v", "initial_state"))
    return d_o.to(call["v"].dtype), d_state


def gradients(call: dict[str, Any], wanted: tuple[str, ...], d_o: Tensor | None, d_state: Tensor | None,
              **options: Any) -> dict[str, Tensor]:  # fmt: skip
    leaves = {name: call[name].clone().requires_grad_() for name in wanted}
    outputs = kda.chunk_kda(**call | leaves, backend="tilelang", **options)
    given = [(y, d) for y, d in zip(outputs, (d_o, d_state), strict=True) if d is not None]
    found = torch.autograd.grad([y for y, _ in given], list(leaves.values()), [d for _, d in given])
    return dict(zip(wanted, found, strict=True))


def check(call: dict[str, Any], wanted: tuple[str, ...], d_o: Tensor | None, d_state: Tensor | None,
          limit: float = LIMIT) -> None:  # fmt: skip
    expected = chunk_kda_backward_golden(torch.zeros_like(call["v"]) if d_o is None else d_o, d_state, **call)
    for name, x in gradients(call, wanted, d_o, d_state).items():
        assert x.shape == call[name].shape and x.dtype == call[name].dtype, name
        assert rel_rmse(x, expected[name]) <= limit, name


@pytest.mark.parametrize("wanted", [DIFFERENTIABLE, ("q",), ("A_log",), ("initial_state", "v")], ids="-".join)
def test_only_what_is_wanted(wanted: tuple[str, ...]) -> None:
    call = packed()
    check(call, wanted, *outer(call))


def test_a_loss_of_one_output_alone() -> None:
    call = packed()
    d_o, d_state = outer(call)
    check(call, DIFFERENTIABLE, None, d_state)
    check(call | {"output_final_state": False}, DIFFERENTIABLE, d_o, None)


def test_no_gradient_of_o_is_one_of_zeros() -> None:
    """autograd hands out zeros, another caller of the backend may hand out None."""
    call = packed()
    d_o, d_state = outer(call)
    backward = backends.load("tilelang").chunk_kda_backward
    arguments = checked("chunk_kda", **call), DIFFERENTIABLE
    none, zeros = backward(*arguments, None, d_state), backward(*arguments, torch.zeros_like(d_o)[None], d_state)
    assert all(torch.equal(x, zeros[name]) for name, x in none.items())


@pytest.mark.parametrize("loss_scale", [2.0**-10, 1.0, 2.0**10])
def test_fp16(loss_scale: float) -> None:
    """Whose gradients are computed in bf16, since dh and db with a loss scale may be beyond fp16."""
    call = packed(torch.float16)
    d_o, d_state = outer(call)
    d_o, d_state = d_o * loss_scale, d_state * loss_scale
    check(call, DIFFERENTIABLE, d_o, d_state, limit=8e-3)


def test_second_derivatives_are_torchs() -> None:
    call, found = packed(), []
    for backend in ("torch", "tilelang"):
        leaves = {name: call[name].clone().requires_grad_() for name in ("q", "k", "g")}
        o, state = kda.chunk_kda(**call | leaves, backend=backend)
        first = torch.autograd.grad(o.square().sum() + state.square().sum(), list(leaves.values()), create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), list(leaves.values())))
    for expected, actual in zip(*found, strict=True):
        assert expected.any() and rel_rmse(actual, expected) <= 1e-4
