"""M1 in both of the golden's forms: each flag is its formula, and the bound on the gate changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from golden_calls import PER_TOKEN, check

from kda.golden import activation, chunk_kda_golden, inputs, recurrent_kda_golden, rel_rmse


@pytest.mark.parametrize("lower_bound", [None, -5.0, -0.5])
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
@pytest.mark.parametrize("parameters", [True, False])
def test_flags_are_their_formulas(lower_bound: float | None, allow_neg_eigval: bool, parameters: bool) -> None:
    if lower_bound is None and not parameters:
        pytest.skip("the softplus gate needs A_log")
    options = {"lower_bound": lower_bound, "allow_neg_eigval": allow_neg_eigval}
    call = inputs.raw(1, 70, 2, 16, HV=4, dtype=torch.float64, **options)
    if not parameters:
        call |= {"A_log": None, "dt_bias": None}
    check(call)

    x, rate = call["g"], 1.0
    if parameters:
        x, rate = x + call["dt_bias"].double().view(4, 16), call["A_log"].double().exp().view(4, 1)
    plain = {name: call[name] for name in ("v", "output_final_state")}
    plain |= {name: call[name] / (call[name].square().sum(-1, keepdim=True) + 1e-6).sqrt() for name in ("q", "k")}
    plain["g"] = -rate * torch.log1p(x.exp()) if lower_bound is None else lower_bound / (1 + torch.exp(-rate * x))
    plain["beta"] = (2 if allow_neg_eigval else 1) / (1 + torch.exp(-call["beta"]))
    for form in (chunk_kda_golden, recurrent_kda_golden):
        for actual, expected in zip(form(**call), form(**plain, scale=0.25), strict=True):
            assert rel_rmse(actual, expected) <= 1e-10


def test_scale() -> None:
    call = inputs.stable(1, 70, 2, 16)
    for form in (chunk_kda_golden, recurrent_kda_golden):
        assert torch.equal(form(**call)[0], form(**call, scale=0.25)[0])
        assert torch.allclose(form(**call, scale=1.0)[0], 4 * form(**call)[0])


def test_raw_gate_without_its_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match="A_log: expected with use_gate_in_kernel"):
        chunk_kda_golden(**inputs.raw(1, 5, 1, 16) | {"A_log": None})


def test_bound_changes_nothing() -> None:
    call = inputs.stable(1, 150, 2, 32, gate="half_1000", dtype=torch.float32)
    outcomes = [
        chunk_kda_golden(**call | {"g": call["g"].masked_fill(call["g"] == -1000, strong)}, dtype=torch.float32)
        for strong in (-1000.0, -104.0, -math.inf, -3e38)
    ]
    for o, state in outcomes[1:]:
        assert torch.equal(o, outcomes[0][0]) and torch.equal(state, outcomes[0][1])


@pytest.mark.parametrize("strong", [-1000.0, -math.inf])
def test_strong_gate_forgets_all_that_was(strong: float) -> None:
    call = inputs.stable(1, 60, 2, 16, initial_state=True)
    call["g"][:, 30] = strong
    rest = {name: x[:, 30:] if name in PER_TOKEN else x for name, x in call.items() if name != "initial_state"}
    for form in (chunk_kda_golden, recurrent_kda_golden):
        (o, state), (o_rest, state_rest) = form(**call), form(**rest)
        assert rel_rmse(o[:, 30:], o_rest) <= 1e-12 and rel_rmse(state, state_rest) <= 1e-12


def test_unbounded_gate_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    call = inputs.stable(1, 70, 1, 16, gate="mixed")
    monkeypatch.setattr(activation, "MIN_LOG_DECAY", -math.inf)
    assert chunk_kda_golden(**call)[0].isnan().any()
