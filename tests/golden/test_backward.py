"""The golden's gradients are autograd's of the token recurrence, whatever the call."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from golden_calls import PER_TOKEN, ragged
from torch import Tensor

from kda.golden import (
    chunk_kda_backward_golden,
    chunk_kda_backward_stages,
    chunk_kda_golden,
    inputs,
    recurrent_kda_golden,
)
from kda.golden.call import Call

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Of the largest error of a gradient, relative to its largest element."""

FP64: dict[str, Any] = {"dtype": torch.float64, "initial_state": True}
Gradients = dict[str, Tensor]


def recurrence(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The definition of the operator, as autograd can follow it: o and the final state."""
    c = Call(**call)
    parameters = {"A_log": (c.HV, 1), "dt_bias": (c.HV, c.K)}
    given = {name: call[name].view(shape) for name, shape in parameters.items() if name in call}
    act = dataclasses.replace(c.activation, **given)
    q, k, v, g, beta = (call[name].reshape(-1, *call[name].shape[call["v"].dim() - 2 :]) for name in PER_TOKEN)
    q, k = (x.repeat_interleave(c.HV // c.H, 1) for x in (act.queries(q), act.keys(k)))
    decay, beta = act.log_decay(g).exp(), act.step_size(beta)
    o, final = [torch.zeros_like(v[0])] * len(v), []
    for n, (start, length) in enumerate(zip(c.starts.tolist(), c.lengths.tolist(), strict=True)):
        S = c.to_kv(call["initial_state"][n]) if "initial_state" in call else v.new_zeros(c.HV, c.K, c.V)
        for t in range(start, start + length):
            S = decay[t].unsqueeze(-1) * S
            S = S + k[t].unsqueeze(-1) * (beta[t].unsqueeze(-1) * (v[t] - read(S, k[t]))).unsqueeze(-2)
            o[t] = read(S, q[t])
        final.append(c.to_kv(S))
    return torch.stack(o).view(c.o_shape), torch.stack(final)


def read(S: Tensor, x: Tensor) -> Tensor:
    return (x.unsqueeze(-2) @ S).squeeze(-2)


def in_fp64(call: dict[str, Any]) -> dict[str, Any]:
    return {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in call.items()}


def some_gradients(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Of o and of the final state, where not told otherwise."""
    o, state = chunk_kda_golden(**call | {"output_final_state": True})
    generator = torch.Generator().manual_seed(1)
    do, d_state = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (o, state))
    return do, d_state


def expected(call: dict[str, Any], do: Tensor, d_final_state: Tensor | None) -> Gradients:
    """Autograd's gradients of the recurrence, which is held to the golden's own."""
    names = [name for name in (*PER_TOKEN, "initial_state", "A_log", "dt_bias") if name in call]
    leaves = {name: call[name].clone().requires_grad_() for name in names}
    o, state = recurrence(call | leaves)
    for a, e in zip((o, state), recurrent_kda_golden(**call | {"output_final_state": True}), strict=True):
        torch.testing.assert_close(a.detach(), e, rtol=1e-11, atol=1e-12)
    loss = (o * do).sum() + (0 if d_final_state is None else (state * d_final_state).sum())
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(names, gradients, strict=True))


def error(actual: Gradients, reference: Gradients) -> dict[str, float]:
    """Largest error of each gradient, relative to its largest element; what fp32 cannot tell from 0 counts as 0."""
    assert actual.keys() == reference.keys()
    errors = {}
    for name, e in reference.items():
        a = actual[name]
        assert a.shape == e.shape and a.isfinite().all(), name
        floor = torch.finfo(torch.float32).tiny if a.dtype == torch.float32 else 0.0
        difference, largest = (a - e).abs().max().item(), e.abs().max().item()
        errors[name] = 0.0 if difference <= floor else difference / largest if largest else math.inf
    return errors


def check(call: dict[str, Any], **options: Any) -> None:
    """fp64 and fp32 against autograd."""
    call = in_fp64(call)
    do, d_state = some_gradients(call)
    reference = expected(call, do, d_state)
    for dtype, limit in LIMIT.items():
        errors = error(chunk_kda_backward_golden(do, d_state, **call, dtype=dtype, **options), reference)
        assert max(errors.values()) <= limit, (dtype, errors)


@pytest.mark.parametrize(
    "gate", ["logsigmoid", 0.0, -1.5, -5.0, -100.0, -104.0, -1000.0, -math.inf, "half_1000", "mixed"]
)
def test_every_gate(gate: str | float) -> None:
    check(inputs.stable(1, 150, 2, 32, V=48, HV=4, gate=gate, **FP64))


def changed(call: dict[str, Any], name: str, tokens: slice, by: float) -> dict[str, Any]:
    """The call with some tokens of one tensor multiplied."""
    x = call[name].clone()
    x[:, tokens] *= by
    return call | {name: x}


SHORT = (1, 70, 2, 16)
SOFTPLUS, BOUNDED = inputs.raw(1, 130, 2, 16, **FP64), inputs.raw(1, 130, 2, 16, HV=4, lower_bound=-5.0, **FP64)
WITHOUT_PARAMETERS = {name: x for name, x in BOUNDED.items() if name not in ("A_log", "dt_bias")}
RAW, STABLE = inputs.raw(*SHORT, **FP64), inputs.stable(*SHORT, **FP64)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(SOFTPLUS, id="softplus gate"),
        pytest.param(changed(SOFTPLUS, "g", slice(None, None, 7), 60), id="saturated softplus gate"),
        pytest.param(BOUNDED, id="bounded gate"),
        pytest.param(changed(BOUNDED, "g", slice(None, None, 7), 60), id="saturated bounded gate"),
        pytest.param(WITHOUT_PARAMETERS, id="bounded gate without parameters"),
        pytest.param(RAW | {"allow_neg_eigval": True}, id="negative eigenvalues"),
        pytest.param(STABLE | {"use_qk_l2norm_in_kernel": True, "scale": 0.7}, id="norm alone, scale"),
        pytest.param(STABLE | {"use_beta_sigmoid_in_kernel": True}, id="sigmoid alone"),
        pytest.param(changed(changed(RAW, "k", slice(5, 9), 0), "q", slice(3, 6), 0), id="zero rows"),
        pytest.param(changed(STABLE, "beta", slice(None, None, 3), 0), id="beta of 0"),
        pytest.param(inputs.collinear(1, 150, 2, 32, **FP64), id="near-identical keys"),
        pytest.param(inputs.stable(3, 70, 2, 16, HV=12, V=8, **FP64), id="batch, six value heads a head"),
        pytest.param(inputs.raw(2, 1, 1, 8, **FP64), id="one token"),
        pytest.param(inputs.raw(2, 70, 1, 8, dtype=torch.float64), id="no initial state"),
    ],
)
def test_other_calls(call: dict[str, Any]) -> None:
    check(call)


@pytest.mark.parametrize("chunk_size", [1, 2, 16, 64, 100])
def test_any_chunk_size(chunk_size: int) -> None:
    check(inputs.raw(1, 75, 1, 16, V=8, HV=2, lengths=[33, 0, 1, 41], **FP64), chunk_size=chunk_size)


@pytest.mark.parametrize("state_v_first", [True, False])
@pytest.mark.parametrize("generator", [inputs.raw, inputs.stable])
def test_packed_sequences_and_padding(generator: Any, state_v_first: bool) -> None:
    """Whatever lies at tokens of no sequence, before the first one and behind the last one, reaches nothing."""
    call = in_fp64(ragged(generator, lengths=[64, 1, 0, 130, 37, 0], state_v_first=state_v_first))
    call["cu_seqlens"] = call["cu_seqlens"] + 6
    do, d_state = some_gradients(call)
    reference = expected(call, do, d_state)
    inside = slice(*call["cu_seqlens"][[0, -1]].tolist())
    padding = torch.ones(do.shape[1], dtype=torch.bool)
    padding[inside] = False
    for x in (do, *(call[name] for name in PER_TOKEN)):
        x[:, padding] = math.nan
    actual = chunk_kda_backward_golden(do, d_state, **call)
    assert max(error(actual, reference).values()) <= LIMIT[torch.float64]
    for name in PER_TOKEN:
        assert padding.sum() == 15 and actual[name][:, padding].eq(0).all()
    for n in (2, 5):
        assert torch.equal(actual["initial_state"][n], d_state[n]), "an empty sequence hands its state on"


@pytest.mark.parametrize("lengths", [None, [], [0, 0]])
def test_calls_without_tokens_hand_the_states_gradient_on(lengths: list[int] | None) -> None:
    call = inputs.raw(1, 0, 2, 16, HV=4, lengths=lengths, **FP64)
    do, d_state = some_gradients(call)
    gradients = chunk_kda_backward_golden(do, d_state, **call)
    assert torch.equal(gradients["initial_state"], d_state)
    assert all(x.shape == call[name].shape and not x.any() for name, x in gradients.items() if name != "initial_state")


def test_layouts_of_the_call_and_of_gradients() -> None:
    call = in_fp64(ragged())
    do, d_state = some_gradients(call)
    whole = chunk_kda_backward_golden(do, d_state, **call)
    flat = chunk_kda_backward_golden(do[0], d_state, **call | {name: call[name][0] for name in PER_TOKEN})
    spread = torch.stack([do, do], -1).requires_grad_()
    strided = chunk_kda_backward_golden(spread[..., 0], d_state.mT.contiguous().mT, **call)
    for name, gradient in whole.items():
        assert gradient.shape == call[name].shape and gradient.dtype == torch.float64
        assert torch.equal(flat[name].view_as(gradient), gradient)
        assert torch.equal(strided[name], gradient) and not strided[name].requires_grad
    with pytest.raises(ValueError, match=r"do: expected v's shape \[1, 247, 4, 16\], got \[247, 4, 16\]"):
        chunk_kda_backward_golden(do[0], d_state, **call)


def test_no_gradient_of_the_final_state_is_one_of_zeros() -> None:
    call = in_fp64(ragged(initial_state=False))
    do, d_state = some_gradients(call)
    none, zeros = (chunk_kda_backward_golden(do, x, **call) for x in (None, 0 * d_state))
    assert set(none) == {*PER_TOKEN, "A_log", "dt_bias"} and all(torch.equal(none[name], zeros[name]) for name in none)
    assert max(error(none, expected(call, do, None)).values()) <= LIMIT[torch.float64]


def test_parameters_that_the_gate_does_not_use_have_no_gradient() -> None:
    call = in_fp64(STABLE) | {"A_log": torch.zeros(2), "dt_bias": torch.zeros(32)}
    do, d_state = some_gradients(call)
    assert set(chunk_kda_backward_golden(do, d_state, **call)) == {*PER_TOKEN, "initial_state"}
    assert not {"dA_log", "ddt_bias"} & set(chunk_kda_backward_stages(do, d_state, **call))


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_what_flows_through_a_closed_gate_is_right_by_itself(dtype: torch.dtype) -> None:
    """Held to the largest element of g's gradient at such gates, which is tiny, not to the largest one of all."""
    closed = -100.0 if dtype == torch.float64 else -60.0
    call = in_fp64(inputs.stable(1, 100, 1, 16, gate=-0.1, **FP64))
    call["g"][:, 20:90:7] = closed
    do, d_state = some_gradients(call)
    reference = expected(call, do, d_state)["g"]
    actual = chunk_kda_backward_golden(do, d_state, **call, dtype=dtype)["g"]
    actual, reference = actual[:, 20:90:7], reference[:, 20:90:7]
    assert 0 < reference.abs().max() < 10 * math.exp(closed)
    assert (actual - reference).abs().max() <= LIMIT[dtype] * reference.abs().max()


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize(("A_log", "times"), [(60.0, 1.0), (1000.0, 1.0), (1000.0, 1e30)])
def test_gates_that_cannot_move_have_no_gradient(A_log: float, times: float, lower_bound: float | None) -> None:
    call = changed(RAW, "g", slice(None), times) | {"lower_bound": lower_bound}
    call |= {"A_log": torch.full((2,), A_log), "dt_bias": 0 * call["dt_bias"]}
    gradients = chunk_kda_backward_golden(*some_gradients(call), **call)
    assert all(x.isfinite().all() for x in gradients.values()) and gradients["q"].any()
    assert not any(gradients[name].any() for name in ("g", "A_log", "dt_bias"))


def test_rows_whose_squares_are_beyond_fp32() -> None:
    call = changed(STABLE, "q", slice(0, 70), 1e25) | {"use_qk_l2norm_in_kernel": True}
    do, d_state = some_gradients(call)
    actual, reference = (chunk_kda_backward_golden(do, d_state, **call, dtype=dtype)["q"] for dtype in reversed(LIMIT))
    assert (actual - reference).abs().max() <= LIMIT[torch.float32] * reference.abs().max() < 1e-20


def test_same_bits_for_any_number_of_threads() -> None:
    call = ragged(HV=8)
    do, d_state = some_gradients(call)
    threads = torch.get_num_threads()
    try:
        results = []
        for number in (1, 3):
            torch.set_num_threads(number)
            results.append(chunk_kda_backward_golden(do, d_state, **call))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0][name], x) for name, x in results[1].items())
