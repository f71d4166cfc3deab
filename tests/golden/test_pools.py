"""The golden's token recurrence on pools of states: slots, null slots, in place or not, speculative decoding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kda.golden import inputs, recurrent_kda_golden

LENGTHS = [3, 1, 0, 4, 2]
H, K, V, SLOTS = 2, 16, 8, 24
POOL = ("cu_seqlens", "ssm_state_indices", "num_accepted_tokens", "inplace_final_state")


def call(lengths: list[int] = LENGTHS, **options: Any) -> dict[str, Any]:
    """A TND call on a pool whose null slot is poison."""
    made = inputs.raw(1, sum(lengths) + 2, H, K, V, lengths=lengths)
    pool = torch.randn(SLOTS, H, V, K, generator=torch.Generator().manual_seed(1))
    pool[0] = math.nan
    return made | {"initial_state": pool} | options


def alone(made: dict[str, Any], n: int, state: Tensor, tokens: int | None = None) -> tuple[Tensor, Tensor]:
    """o and state of sequence n by itself, from `state`, after its first `tokens`."""
    start = sum(LENGTHS[:n])
    at = slice(start, start + (LENGTHS[n] if tokens is None else tokens))
    own = {name: x for name, x in made.items() if name not in POOL}
    own |= {name: made[name][:, at] for name in ("q", "k", "v", "g", "beta")}
    o, final = recurrent_kda_golden(**own | {"initial_state": state[None]})
    return o[0], final[0]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected.double(), rtol=1e-12, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("null", [0, -1])
def test_one_slot_a_sequence(inplace: bool, null: int) -> None:
    slots = [7, null, 3, 11, 5]
    made = call(ssm_state_indices=torch.tensor(slots, dtype=torch.int32), inplace_final_state=inplace)
    pool = made["initial_state"].clone()
    o, final = recurrent_kda_golden(**made)
    expected = pool.double() if inplace else torch.zeros(len(slots), H, V, K).double()
    for n, slot in enumerate(slots):
        start = sum(LENGTHS[:n])
        o_n, state_n = alone(made, n, pool[slot])
        live = slot > 0
        close(o[0, start : start + LENGTHS[n]], o_n if live else torch.zeros_like(o_n))
        if live:
            expected[slot if inplace else n] = state_n
    close(final, expected)
    assert o[0, sum(LENGTHS) :].eq(0).all()
    torch.testing.assert_close(made["initial_state"], pool, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("accepted", [None, [1, 4, 2, 3, 1]])
def test_one_slot_a_drafted_token(inplace: bool, accepted: list[int] | None) -> None:
    slots = torch.arange(1, 21).view(5, 4)
    slots[0, 2], slots[3, 1] = 0, -1  # not written; neither is where its sequence starts
    slots[4, 0] = 0  # where the last sequence starts: all of it is null
    options = {} if accepted is None else {"num_accepted_tokens": torch.tensor(accepted)}
    made = call(ssm_state_indices=slots, inplace_final_state=inplace, **options)
    pool = made["initial_state"]
    o, final = recurrent_kda_golden(**made)
    expected = pool.double().clone() if inplace else torch.zeros(o.shape[1], H, V, K).double()
    for n, length in enumerate(LENGTHS):
        start, first = sum(LENGTHS[:n]), int(slots[n, (accepted or [1] * 5)[n] - 1])
        for t in range(length if first > 0 else 0):
            o_n, state = alone(made, n, pool[first], t + 1)
            close(o[0, start : start + t + 1], o_n)
            slot = int(slots[n, t])
            if not inplace:
                expected[start + t] = state
            elif slot > 0:
                expected[slot] = state
        if first <= 0:
            assert o[0, start : start + length].eq(0).all()
    close(final, expected)


def test_in_place_without_slots_returns_the_states() -> None:
    made = inputs.raw(2, 5, H, K, V, initial_state=True)
    before = made["initial_state"].clone()
    o, state = recurrent_kda_golden(**made)
    for output_final_state in (True, False):
        again = recurrent_kda_golden(**made | {"inplace_final_state": True, "output_final_state": output_final_state})
        assert torch.equal(again[0], o) and torch.equal(again[1], state)
    assert torch.equal(made["initial_state"], before)


def test_pool_layouts_agree() -> None:
    made = call(ssm_state_indices=torch.tensor([7, 2, 3, 11, 5]), inplace_final_state=True)
    kv = made | {"initial_state": made["initial_state"].transpose(-1, -2), "state_v_first": False}
    for x, y in zip(recurrent_kda_golden(**made), recurrent_kda_golden(**kv), strict=True):
        close(x, y if y.shape == x.shape else y.transpose(-1, -2))


def test_unmatched_arguments_are_refused() -> None:
    made = inputs.raw(1, 5, H, K, V)
    with pytest.raises(ValueError, match="initial_state: expected with ssm_state_indices"):
        recurrent_kda_golden(**made, ssm_state_indices=torch.tensor([1]))
    with pytest.raises(ValueError, match="initial_state: expected with ssm_state_indices or inplace"):
        recurrent_kda_golden(**made, inplace_final_state=True)
    with pytest.raises(ValueError, match="num_accepted_tokens: needs"):
        recurrent_kda_golden(**call(), num_accepted_tokens=torch.ones(5, dtype=torch.int32))


def test_what_names_no_slot_is_null() -> None:
    """Indices past the pool, or of 64 bits with a slot's number in the lower 32, and counts out of 1..S."""
    made = call()
    pool, known = made["initial_state"], torch.tensor([1, 2, 3, 4, 5])
    wrong = torch.tensor([1, SLOTS, 2**32 + 3, -1, 5])
    counts = torch.tensor([1, 2, 0, 5, 1])
    drafts = known[:, None].repeat(1, 4)
    for slots in ({"ssm_state_indices": wrong}, {"ssm_state_indices": drafts, "num_accepted_tokens": counts}):
        o, states = recurrent_kda_golden(**made, **slots)
        live = [0, 4] if "num_accepted_tokens" not in slots else [0, 1, 4]
        for n, part in enumerate(o[0, : sum(LENGTHS)].split(LENGTHS)):
            close(part, alone(made, n, pool[known[n]])[0] if n in live else torch.zeros_like(part))
        if states.shape[0] == len(LENGTHS):
            assert not states[1:4].any()


def test_tokens_past_the_last_slot_leave_no_state() -> None:
    made = call(ssm_state_indices=torch.arange(1, 11).view(5, 2), inplace_final_state=True)
    pool = made["initial_state"].clone()
    o, after = recurrent_kda_golden(**made)
    for n, length in enumerate(LENGTHS):
        for t in range(min(length, 2)):
            close(after[1 + 2 * n + t], alone(made, n, pool[1 + 2 * n], t + 1)[1])
    close(o[0, 4:8], alone(made, 3, pool[7])[0])
    torch.testing.assert_close(after[11:], pool[11:].double(), rtol=0, atol=0)
