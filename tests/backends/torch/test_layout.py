"""Which tokens the torch backend works on together changes nothing: packed sequences, padding, foreign memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch_calls import FP32_LIMIT, LENGTHS, assert_matches_recurrence, assert_same_bits, run

from kda.golden import inputs, rel_rmse

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("lengths", [LENGTHS, [0, 0, 0], [128, 0, 128], [1] * 40, [300, 1, 1, 1]])
def test_packed_sequences(lengths: list[int]) -> None:
    call = inputs.stable(1, sum(lengths) + 9, 2, 32, 16, lengths=lengths, dtype=torch.float32, initial_state=True)
    assert_matches_recurrence(call)
    o, state = run(call)
    assert not o[:, sum(lengths) :].any()
    empty = [n for n, length in enumerate(lengths) if length == 0]
    assert torch.equal(state[empty], call["initial_state"][empty])


def test_unpacked_rank_three_input() -> None:
    call = inputs.stable(1, 400, 2, 32, lengths=LENGTHS, dtype=torch.float32)
    flat = call | {name: call[name][0] for name in ("q", "k", "v", "g", "beta")}
    assert_same_bits(run(flat), (run(call)[0][0], run(call)[1]))


@pytest.mark.parametrize("T", [37, 64, 4117])
def test_one_packed_sequence_is_bit_identical_to_fixed_length(T: int) -> None:
    call = inputs.stable(1, T, 2, 32, dtype=torch.float32, initial_state=True)
    assert_same_bits(run(call), run(call | {"cu_seqlens": torch.tensor([0, T])}))


@pytest.mark.parametrize("B, T", [(1, 0), (3, 0), (0, 5)])
def test_no_tokens(B: int, T: int) -> None:
    call = inputs.stable(B, T, 2, 8, 4, initial_state=True)
    o, state = run(call)
    assert o.shape == (B, T, 2, 4) and torch.equal(state, call["initial_state"])


def test_more_sequences_than_fit_a_launch_grid() -> None:
    N = 70_000
    call = inputs.stable(1, N, 1, 4, 2, lengths=[1] * N, dtype=torch.float32)
    o, _ = run(call)
    q, k, v, beta = (call[name].double() for name in ("q", "k", "v", "beta"))
    assert rel_rmse(o, (q * k).sum(-1, keepdim=True) * 4**-0.5 * beta.unsqueeze(-1) * v) <= FP32_LIMIT


def test_carried_state_continues_a_sequence() -> None:
    call = inputs.stable(1, 300, 2, 32, dtype=torch.float32)
    whole, last = run(call)
    parts, state = [], None
    for at in range(0, 300, 100):
        part = {name: call[name][:, at : at + 100] for name in ("q", "k", "v", "g", "beta")}
        o, state = run(call | part | {"initial_state": state})
        parts.append(o)
    assert rel_rmse(torch.cat(parts, 1), whole) <= 1e-6 and rel_rmse(state, last) <= 1e-6


def test_later_tokens_do_not_matter() -> None:
    call = inputs.stable(1, 300, 2, 32, dtype=torch.float32)
    o, _ = run(call)
    call["v"][:, 150:] = 1e4
    call["g"][:, 150:] = -1000.0
    assert rel_rmse(run(call)[0][:, :150], o[:, :150]) <= 1e-6


def test_edited_cu_seqlens_count() -> None:
    call = inputs.stable(1, 100, 1, 16, lengths=[40, 60], dtype=torch.float32)
    run(call)
    call["cu_seqlens"][1] = 70
    assert_matches_recurrence(call)


@pytest.mark.parametrize(
    "bounds, message",
    [
        ([-1, 5], "no negative value, got -1 first"),
        ([0, 5, 3], "no decrease, got 5 and then 3 at index 2"),
        ([0, 9], "at most T = 8 last, got 9"),
    ],
)
def test_wrong_cu_seqlens_are_named(bounds: list[int], message: str) -> None:
    call = inputs.stable(1, 8, 1, 4)
    with pytest.raises(ValueError, match=f"cu_seqlens: expected {message}"):
        run(call | {"cu_seqlens": torch.tensor(bounds)})


def test_strided_inputs() -> None:
    call = inputs.raw(2, 100, 2, 16, 16, dtype=torch.float32, initial_state=True)
    fused = torch.cat([call["q"], call["k"], call["v"]], 2)
    strided = dict(zip("qkv", fused.split(2, 2), strict=True))
    strided["g"] = call["g"].transpose(1, 2).contiguous().transpose(1, 2)
    strided["beta"] = torch.stack([call["beta"], call["beta"]], -1)[..., 0]
    strided["initial_state"] = call["initial_state"].mT.contiguous().mT
    assert not any(x.is_contiguous() for x in strided.values())
    assert_same_bits(run(call | strided), run(call))


def test_inputs_are_left_alone_and_runs_repeat() -> None:
    call = inputs.raw(1, 400, 2, 32, lengths=LENGTHS, initial_state=True)
    before = {name: x.clone() for name, x in call.items() if isinstance(x, Tensor)}
    first = run(call)
    run(inputs.stable(2, 70, 3, 16))
    assert_same_bits(run(call), first)
    for name, x in before.items():
        assert torch.equal(call[name], x), name


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30])
def test_padding_leaves_no_trace(poison: float) -> None:
    call = inputs.raw(1, 100, 2, 16, lengths=[30, 0, 53], dtype=torch.float32, initial_state=True)
    clean = run(call)
    for name in ("q", "k", "v", "g", "beta"):
        call[name][:, 83:] = poison
        call[name].requires_grad_()
    o, state = run(call)
    assert_same_bits((o, state), clean)
    (o.sum() + state.sum()).backward()
    for name in ("q", "k", "v", "g", "beta"):
        assert call[name].grad.isfinite().all() and not call[name].grad[:, 83:].any(), name
