"""Each stage of the backward pass, broken as a kernel might be: gradients show it, and the stage is named."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kda.golden import chunk_kda_backward_golden, chunk_kda_backward_stages, first_departure, inputs, rel_rmse
from kda.golden.backward import stages
from kda.golden.backward.activation import activate_backward
from kda.golden.backward.carry import CarryGradients, carry_backward
from kda.golden.backward.scores import scores_backward
from kda.golden.backward.wy import WYGradients, wy_backward

pytestmark = pytest.mark.usefixtures("one_thread")


def with_inputs(stage: Callable[..., Any], **changes: Callable[[Tensor], Any]) -> Callable[..., Any]:
    """The stage, given something else for some of its arguments."""
    names = list(inspect.signature(stage).parameters)

    def broken(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        return stage(**given | {name: change(given[name]) for name, change in changes.items()})

    return broken


def dh_of_the_state_that_enters(*args: Any, **kwargs: Any) -> CarryGradients:
    good = carry_backward(*args, **kwargs)
    return good._replace(dh=torch.cat([good.d_initial_state[None], good.dh[:-1]]))


def with_the_diagonal(h: Tensor, v_new: Tensor, do: Tensor, db: Tensor, dh: Tensor) -> WYGradients:
    return wy_backward(h, v_new, do, db, dh)._replace(dAkk=-(db @ v_new.mT).tril())


def flags(**changes: Any) -> Callable[[Any], Any]:
    return lambda act: dataclasses.replace(act, **changes)


BROKEN: list[tuple[str, Callable[..., Any], str]] = [
    ("carry_backward", with_inputs(carry_backward, decay=torch.ones_like), "dM4 (dv_new"),
    ("carry_backward", with_inputs(carry_backward, w=torch.zeros_like), "dM4 (dv_new"),
    ("carry_backward", with_inputs(carry_backward, Ainv=lambda x: x.mT), "dM4 (db"),
    ("carry_backward", dh_of_the_state_that_enters, "dM4 (dh"),
    ("wy_backward", with_the_diagonal, "dM3 (dAkk"),
    ("wy_backward", with_inputs(wy_backward, db=torch.neg), "dM3 (dAkk"),
    ("scores_backward", with_inputs(scores_backward, dAqk=lambda x: x.tril(-1)), "dM2 (dq_activated"),
    ("scores_backward", with_inputs(scores_backward, beta=torch.ones_like), "dM2 (dk_activated"),
    ("scores_backward", with_inputs(scores_backward, dkg=torch.zeros_like), "dM2 (dk_activated"),
    ("scores_backward", with_inputs(scores_backward, v=torch.zeros_like), "dM2 (dbeta_activated"),
    ("scores_backward", with_inputs(scores_backward, ddecay=torch.zeros_like), "dM2 (dg_activated"),
    ("activate_backward", with_inputs(activate_backward, valid=lambda _: None), "dM1 (dg"),
    ("activate_backward", with_inputs(activate_backward, act=flags(scale=1.0)), "dM1 (dq"),
    ("activate_backward", with_inputs(activate_backward, act=flags(use_qk_l2norm_in_kernel=False)), "dM1 (dq"),
    ("activate_backward", with_inputs(activate_backward, act=flags(use_gate_in_kernel=False)), "dM1 (dg"),
    ("activate_backward", with_inputs(activate_backward, act=flags(dt_bias=None)), "dM1 (dg"),
    ("activate_backward", with_inputs(activate_backward, act=flags(use_beta_sigmoid_in_kernel=False)), "dM1 (dbeta"),
]

Judged = tuple[dict[str, Any], tuple[Tensor, Tensor], dict[str, Tensor], dict[str, Tensor]]


@pytest.fixture(scope="module")
def judged() -> Judged:
    """A call with tails in it, gradients of its results, and the golden's gradients and tables."""
    options: dict[str, Any] = {"dtype": torch.float64, "initial_state": True}
    call = inputs.raw(1, 170, 1, 16, HV=2, lengths=[1, 130, 39], **options)
    generator = torch.Generator().manual_seed(1)
    do, d_state = (
        torch.randn(call[name].shape, generator=generator, dtype=torch.float64) for name in ("v", "initial_state")
    )
    given = do, d_state
    return call, given, chunk_kda_backward_golden(*given, **call), chunk_kda_backward_stages(*given, **call)


@pytest.mark.parametrize(("stage", "replacement", "departure"), BROKEN)
def test_broken_stages_are_seen_and_named(
    monkeypatch: pytest.MonkeyPatch, judged: Judged, stage: str, replacement: Callable[..., Any], departure: str
) -> None:
    call, given, gradients, tables = judged
    monkeypatch.setattr(stages, stage, replacement)
    found = first_departure(chunk_kda_backward_stages(*given, **call), tables, 1e-6)
    assert found is not None and found.startswith(departure)
    errors = {name: rel_rmse(x, gradients[name]) for name, x in chunk_kda_backward_golden(*given, **call).items()}
    assert max(errors.values()) > 1e-3
