"""The torch backend's fused_recurrent_kda against the fp64 token recurrence, and its handling of state pools."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kda
from kda import golden
from kda.golden import inputs, rel_rmse

LENGTHS = [4, 0, 3, 4, 1, 2]
SLOTS = torch.tensor([[7, 3, 12, 1], [9, 15, 2, 20], [0, 5, 6, 8], [4, 0, 10, -1], [-1, 11, 13, 14], [16, 17, 18, 19]])
"""Sequence 1 is empty, 2 and 4 start from null slots unless they have accepted a token more, 3 has null slots later."""


pytestmark = pytest.mark.usefixtures("one_thread")


def run(call: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    return kda.fused_recurrent_kda(**call, backend="torch")


def decoding(state_v_first: bool = True) -> dict[str, Any]:
    """Six short sequences and some padding over a pool of 22 slots, of which slot 0 is NaN."""
    call = inputs.stable(1, 17, 2, 8, 4, 4, lengths=LENGTHS, dtype=torch.float32, state_v_first=state_v_first)
    shape = (22, 4, 4, 8) if state_v_first else (22, 4, 8, 4)
    pool = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    pool[0] = torch.nan
    return call | {"initial_state": pool}


def tokens(call: dict[str, Any], start: int, end: int) -> dict[str, Tensor]:
    return {name: call[name][:, start:end] for name in ("q", "k", "v", "g", "beta")}


def assert_matches_recurrence(call: dict[str, Any], limit: float = 1e-6) -> None:
    o_ref, state_ref = golden.recurrent_kda_golden(**call)
    o, state = run(call)
    assert o.dtype == call["v"].dtype and rel_rmse(o, o_ref) <= limit
    assert state.dtype == (torch.float64 if o.dtype == torch.float64 else torch.float32)
    assert rel_rmse(state.nan_to_num(), state_ref.nan_to_num()) <= limit


@pytest.mark.parametrize("gate", ["logsigmoid", -1.5, -5.0, 0.0, -torch.inf, "half_1000", "mixed"])
def test_is_exact_at_every_gate(gate: str | float) -> None:
    assert_matches_recurrence(inputs.stable(2, 150, 2, 32, 16, gate=gate, dtype=torch.float32, initial_state=True))


@pytest.mark.parametrize("state_v_first", [True, False])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_flags_gva_and_packed_sequences(lower_bound: float | None, state_v_first: bool) -> None:
    call = inputs.raw(
        1, 60, 2, 16, 8, 6, lengths=[5, 0, 40, 1, 9], lower_bound=lower_bound, allow_neg_eigval=lower_bound is not None,
        initial_state=True, dtype=torch.float32, state_v_first=state_v_first,
    )  # fmt: skip
    assert_matches_recurrence(call)


@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-13), (torch.bfloat16, 5e-3), (torch.float16, 5e-4)])
def test_dtypes(dtype: torch.dtype, limit: float) -> None:
    assert_matches_recurrence(inputs.stable(1, 100, 2, 16, dtype=dtype), limit)


def test_more_states_than_are_carried_at_a_time() -> None:
    assert_matches_recurrence(inputs.stable(5, 3, 90, 4, dtype=torch.float32, initial_state=True))


def test_continues_a_prefill() -> None:
    call = inputs.stable(1, 150, 2, 16, dtype=torch.float32)
    whole, last = kda.chunk_kda(**call, backend="torch")
    o, state = kda.chunk_kda(**call | tokens(call, 0, 100), backend="torch")
    for t in range(100, 150):
        o_t, state = run(call | tokens(call, t, t + 1) | {"initial_state": state})
        o = torch.cat([o, o_t], 1)
    assert rel_rmse(o, whole) <= 1e-6 and rel_rmse(state, last) <= 1e-6


def test_no_tokens() -> None:
    call = inputs.stable(2, 0, 2, 8, 4, initial_state=True)
    o, state = run(call)
    assert o.shape == (2, 0, 2, 4) and torch.equal(state, call["initial_state"])


def test_strided_inputs_are_read_right_left_alone_and_runs_repeat() -> None:
    call = inputs.raw(2, 20, 2, 16, dtype=torch.float32, initial_state=True)
    strided = dict(zip("qkv", torch.cat([call["q"], call["k"], call["v"]], 2).split(2, 2), strict=True))
    strided["initial_state"] = call["initial_state"].mT.contiguous().mT
    before = {name: x.clone() for name, x in strided.items()}
    for expected, *others in zip(run(call), run(call | strided), run(call), strict=True):
        assert all(torch.equal(expected, other) for other in others)
    assert all(torch.equal(strided[name], x) for name, x in before.items())


# State pools


def test_states_written_over_in_place() -> None:
    call = inputs.stable(1, 9, 2, 8, 4, lengths=[5, 0, 4], dtype=torch.float32, initial_state=True)
    expected = golden.recurrent_kda_golden(**call)
    o, state = run(call | {"inplace_final_state": True})
    assert state is call["initial_state"] and rel_rmse(o, expected[0]) <= 1e-6 and rel_rmse(state, expected[1]) <= 1e-6


POOL_CALLS = {
    "slot per sequence": {"ssm_state_indices": SLOTS[:, 0]},
    "slot per token": {"ssm_state_indices": SLOTS},
    "accepted tokens": {
        "ssm_state_indices": SLOTS.int(),
        "num_accepted_tokens": torch.tensor([3, 1, 2, 1, 1, 4], dtype=torch.int32),
    },
}


@pytest.mark.parametrize("state_v_first", [True, False])
@pytest.mark.parametrize("indices", POOL_CALLS.values(), ids=POOL_CALLS)
def test_pool_is_only_read(indices: dict[str, Tensor], state_v_first: bool) -> None:
    call = decoding(state_v_first) | indices
    before = call["initial_state"].clone()
    assert_matches_recurrence(call)
    assert run(call)[1].isfinite().all()
    assert torch.equal(call["initial_state"].nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("state_v_first", [True, False])
@pytest.mark.parametrize("indices", POOL_CALLS.values(), ids=POOL_CALLS)
def test_pool_is_written_in_place(indices: dict[str, Tensor], state_v_first: bool) -> None:
    call = decoding(state_v_first) | indices | {"inplace_final_state": True}
    before = call["initial_state"].clone()
    o_ref, pool_ref = golden.recurrent_kda_golden(**call)
    o, pool = run(call)
    assert pool is call["initial_state"] and rel_rmse(o, o_ref) <= 1e-6
    assert rel_rmse(pool[1:], pool_ref[1:]) <= 1e-6
    untouched = (pool_ref == before.double()).flatten(1).all(1)
    assert torch.equal(pool[untouched], before[untouched]) and pool[0].isnan().all()
    assert 5 < untouched.sum() < 20


def test_null_sequences_give_zeros() -> None:
    call = decoding() | {"ssm_state_indices": SLOTS}
    o, states = run(call)
    null = [*range(4, 7), *range(11, 12), *range(14, 17)]  # the tokens of sequences 2 and 4, and the padding
    assert not o[0, null].any() and not states[null].any()
    assert all(o[0, t].any() for t in range(17) if t not in null)


def test_all_sequences_null() -> None:
    call = decoding() | {"ssm_state_indices": torch.zeros_like(SLOTS), "inplace_final_state": True}
    before = call["initial_state"].clone()
    o, pool = run(call)
    assert not o.any() and torch.equal(pool[1:], before[1:])
    assert not run(call | {"inplace_final_state": False})[1].any()


def test_empty_sequence_does_not_write_back_what_it_starts_from() -> None:
    slots = SLOTS[:, 0].clone()
    slots[1] = slots[0]  # an engine's padding row may repeat a live slot
    call = decoding() | {"ssm_state_indices": slots, "inplace_final_state": True}
    _, expected = golden.recurrent_kda_golden(**call)
    assert rel_rmse(run(call)[1][1:], expected[1:]) <= 1e-6


def test_final_state_need_not_be_asked_for() -> None:
    call = decoding() | {"ssm_state_indices": SLOTS, "output_final_state": False, "inplace_final_state": True}
    before = call["initial_state"].clone()
    assert run(call)[1] is None
    assert not torch.equal(call["initial_state"][1:], before[1:])


def test_pool_with_padded_slots_is_the_callers_own() -> None:
    call = decoding() | POOL_CALLS["accepted tokens"] | {"inplace_final_state": True}
    storage = torch.full((22, 4 * 4 * 8 + 5), 7.0)
    padded = storage[:, : 4 * 4 * 8].view(22, 4, 4, 8)
    padded.copy_(call["initial_state"])
    o, pool = run(call | {"initial_state": padded})
    o_ref, pool_ref = run(call)
    assert pool is padded and torch.equal(o, o_ref) and torch.equal(padded[1:], pool_ref[1:])
    assert (storage[:, -5:] == 7.0).all()


def test_drafts_that_were_rejected_leave_no_trace() -> None:
    call = inputs.stable(1, 6, 2, 8, dtype=torch.float32) | {"initial_state": 0.1 * torch.randn(5, 2, 8, 8)}
    expected, _ = run(call | {"initial_state": call["initial_state"][2:3], "ssm_state_indices": None})

    def step(positions: list[int], accepted: int) -> Tensor:
        draft = {name: call[name][:, positions] for name in ("q", "k", "v", "g", "beta")}
        slots = {"ssm_state_indices": torch.tensor([[2, 4, 1]]), "num_accepted_tokens": torch.tensor([accepted])}
        return run(call | draft | slots | {"inplace_final_state": True})[0]

    o = [step([0, 1, 5], 1)[:, :2], step([2, 3, 4], 2), step([5], 3)]
    assert rel_rmse(torch.cat(o, 1), expected) <= 1e-6


@pytest.mark.parametrize(
    "change, message",
    [
        ({"cu_seqlens": torch.tensor([0, 3, 2, 4, 5, 6, 7])}, "cu_seqlens: expected no decrease"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(change: dict[str, Tensor], message: str) -> None:
    call = decoding() | {"inplace_final_state": True, "ssm_state_indices": SLOTS}
    before = call["initial_state"].clone()
    with pytest.raises(ValueError, match=message):
        run(call | change)
    assert torch.equal(call["initial_state"].nan_to_num(), before.nan_to_num())


# Gradients


@pytest.mark.parametrize("indices", [None, torch.tensor([2, 0, 1]), torch.tensor([[2, 3], [0, 1], [1, -1]])])
def test_gradcheck(indices: Tensor | None) -> None:
    call = inputs.raw(1, 5, 1, 2, 1, 2, lengths=[2, 1, 2], dtype=torch.float64, initial_state=True)
    if indices is not None:
        call |= {"ssm_state_indices": indices, "initial_state": call["initial_state"].repeat(2, 1, 1, 1)}
    x = {name: t.double() for name, t in call.items() if isinstance(t, Tensor) and t.is_floating_point()}
    tensors = tuple(t.requires_grad_() for t in x.values())
    assert torch.autograd.gradcheck(lambda *t: run(call | dict(zip(x, t, strict=True))), tensors)
