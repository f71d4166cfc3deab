"""The front end of fused_recurrent_kda: what is refused about pools of states and about writing to them."""

from __future__ import annotations

import re

import pytest
import torch
from calls import HV, PARAMETERS, SLOTS, B, K, S, T, V, dense, packed, pool

import kda
from kda.checks import checked

zeros, ints = torch.zeros, lambda *shape: torch.zeros(*shape, dtype=torch.int32)
STATE = zeros(B, HV, V, K)
META = torch.device("meta")


OUT = torch.empty(B, T, HV, V)
BAD_OF_BOTH = {
    "null slot 1": (dense(null_slot=1), ValueError, "null_slot: expected 0 or None, got 1"),
    "null slot False": (dense(null_slot=False), ValueError, "null_slot: expected 0 or None, got False"),
    "out as a list": (dense(out=[]), TypeError, "out: expected a torch.Tensor, got list"),
    "out in bf16": (dense(out=OUT.bfloat16()), TypeError, "out: expected dtype float32, got bfloat16"),
    "out of another shape": (dense(out=OUT[:1]), ValueError,
        "out: expected shape v's = [2, 3, 4, 4], got [1, 3, 4, 4]"),
    "out elsewhere": (dense(out=OUT.to(META)), ValueError, "out: expected device cpu as q, got meta"),
    "out expanded": (dense(out=OUT[:1].expand(B, T, HV, V)), ValueError,
        "out: expected memory of its own for every element, got strides [0, 16, 4, 1] for shape [2, 3, 4, 4]"),
    "out under autograd": (dense(out=OUT, q=dense()["q"].requires_grad_()), ValueError,
        "out: expected torch.no_grad() around it, got q that requires grad; it would not be in the autograd graph"),
}  # fmt: skip
CHECKPOINTS = {"checkpoint_offsets": ints(B), "checkpoint_states": zeros(B, HV, V, K)}
BAD_CHUNK = {
    "offsets alone": (dense(checkpoint_offsets=ints(B)), ValueError,
        "checkpoint_states: expected a tensor beside checkpoint_offsets, got None"),
    "checkpoints alone": (dense(checkpoint_states=zeros(B, HV, V, K)), ValueError,
        "checkpoint_offsets: expected a tensor beside checkpoint_states, got None"),
    "offsets for another N": (dense(**CHECKPOINTS | {"checkpoint_offsets": ints(B + 1)}), ValueError,
        "checkpoint_offsets: expected shape [N] = [2], got [3]"),
    "offsets as bools": (dense(**CHECKPOINTS | {"checkpoint_offsets": ints(B).bool()}), TypeError,
        "checkpoint_offsets: expected dtype int32 or int64, got bool"),
    "checkpoints K first": (dense(**CHECKPOINTS | {"checkpoint_states": zeros(B, HV, K, V)}), ValueError,
        "checkpoint_states: expected shape [N, HV, V, K] = [2, 4, 4, 8], got [2, 4, 8, 4]"),
    "checkpoints of ints": (dense(**CHECKPOINTS | {"checkpoint_states": ints(B, HV, V, K)}), TypeError,
        "checkpoint_states: expected dtype bfloat16 or float16 or float32 or float64, got int32"),
    "chunk states of a batch, flat": (dense(chunk_states=zeros(B, HV, V, K)), ValueError,
        "chunk_states: expected shape [B, ceil(T / 64), HV, V, K] = [2, 1, 4, 4, 8], got [2, 4, 4, 8]"),
    "chunk states of a packed call, in a batch": (packed(chunk_states=zeros(1, 3, HV, V, K)), ValueError,
        "chunk_states: expected shape [chunks, HV, V, K] = [1, 4, 4, 8], got [1, 3, 4, 4, 8]"),
    "checkpoints under autograd": (dense(**CHECKPOINTS, q=dense()["q"].requires_grad_()), ValueError,
        "checkpoint_states: expected torch.no_grad() around it, got q that requires grad; "
        "it would not be in the autograd graph"),
    "indices by token": (pool(), ValueError, "ssm_state_indices: expected [N] with N = 2, got [2, 3]"),
    "fresh or not, without a state": (dense(has_initial_state=ints(B).bool()), ValueError,
        "has_initial_state: expected an initial_state beside it, got initial_state=None"),
    "fresh or not, as ints": (dense(initial_state=STATE, has_initial_state=ints(B)), TypeError,
        "has_initial_state: expected dtype bool, got int32"),
    "fresh or not, for another N": (dense(initial_state=STATE, has_initial_state=ints(B + 1).bool()), ValueError,
        "has_initial_state: expected shape [N] = [2], got [3]"),
    "in place without a state": (dense(inplace_final_state=True), ValueError,
        "inplace_final_state: expected an initial_state to write to, got initial_state=None"),
    "in place under autograd": (
        dense(initial_state=STATE, inplace_final_state=True, q=dense()["q"].requires_grad_()), ValueError,
        "inplace_final_state: expected torch.no_grad() around it, got q that requires grad; "
        "the state would be written over in the autograd graph"),
}  # fmt: skip


@pytest.mark.usefixtures("no_backend")
@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
@pytest.mark.parametrize("arguments, error, message", BAD_OF_BOTH.values(), ids=BAD_OF_BOTH)
def test_both_operators_refuse(operator, arguments, error, message) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        operator(**arguments)


@pytest.mark.usefixtures("no_backend")
@pytest.mark.parametrize("arguments, error, message", BAD_CHUNK.values(), ids=BAD_CHUNK)
def test_chunk_kda_refuses(arguments, error, message) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        kda.chunk_kda(**{name: x for name, x in arguments.items() if name != "num_accepted_tokens"})


BUFFER = zeros(B, T, HV, V, K)
BAD_DRAFTS = {
    "a buffer without steps": (dense(intermediate_states_buffer=BUFFER[:, 0]), ValueError,
        "intermediate_states_buffer: expected shape [rows, S, HV, V, K] = [2, 3, 4, 4, 8], got [2, 4, 4, 8]"),
    "a buffer of no step": (dense(intermediate_states_buffer=BUFFER[:, :0]), ValueError,
        "intermediate_states_buffer: expected shape [rows, S, HV, V, K] = [2, 1, 4, 4, 8], got [2, 0, 4, 4, 8]"),
    "a buffer K first": (dense(intermediate_states_buffer=BUFFER.mT), ValueError,
        "intermediate_states_buffer: expected shape [rows, S, HV, V, K] = [2, 3, 4, 4, 8], got [2, 3, 4, 8, 4]"),
    "a buffer beside slots by token": (pool(intermediate_states_buffer=BUFFER), ValueError,
        "intermediate_states_buffer: expected ssm_state_indices of shape [N] or None beside it, got [2, 3]"),
    "rows without a buffer": (dense(intermediate_state_indices=ints(B)), ValueError,
        "intermediate_state_indices: expected an intermediate_states_buffer beside it, got None"),
    "rows for another N": (dense(intermediate_states_buffer=BUFFER, intermediate_state_indices=ints(B + 1)), ValueError,
        "intermediate_state_indices: expected shape [N] = [2], got [3]"),
}  # fmt: skip
BAD_RECURRENT = BAD_DRAFTS | {
    "in place no bool": (pool(inplace_final_state=1), TypeError, "inplace_final_state: expected a bool, got int"),
    "in place without a state": (dense(inplace_final_state=True), ValueError,
        "inplace_final_state: expected an initial_state to write to, got initial_state=None"),
    "in place on an expanded state": (dense(initial_state=STATE[:1].expand(B, HV, V, K), inplace_final_state=True),
        ValueError, "initial_state: expected memory of its own for every element with inplace_final_state, got "
        "strides [0, 32, 8, 1] for shape [2, 4, 4, 8]"),
    "in place on a state that requires grad": (
        dense(initial_state=STATE.clone().requires_grad_(), inplace_final_state=True), ValueError,
        "inplace_final_state: expected torch.no_grad() around it, got initial_state that requires grad; "
        "the state would be written over in the autograd graph"),
    "in place under autograd": (pool(**PARAMETERS | {"A_log": zeros(HV, requires_grad=True)}), ValueError,
        "inplace_final_state: expected torch.no_grad() around it, got A_log that requires grad; "
        "the state would be written over in the autograd graph"),
    "indices without a pool": (dense(ssm_state_indices=ints(B)), ValueError,
        "ssm_state_indices: expected a pool as initial_state, got initial_state=None"),
    "a pool without a slot": (pool(initial_state=zeros(0, HV, V, K)), ValueError,
        "initial_state: expected shape [slots, HV, V, K] = [1, 4, 4, 8], got [0, 4, 4, 8]"),
    "a pool of rank 0": (pool(initial_state=zeros(())), ValueError,
        "initial_state: expected shape [slots, HV, V, K] = [2, 4, 4, 8], got []"),
    "a pool K first": (pool(initial_state=zeros(SLOTS, HV, K, V)), ValueError,
        "initial_state: expected shape [slots, HV, V, K] = [5, 4, 4, 8], got [5, 4, 8, 4]: "
        "that is the layout of state_v_first=False"),
    "indices as a list": (pool(ssm_state_indices=[1, 2]), TypeError,
        "ssm_state_indices: expected a torch.Tensor, got list"),
    "indices as bools": (pool(ssm_state_indices=ints(B).bool()), TypeError,
        "ssm_state_indices: expected dtype int32 or int64, got bool"),
    "indices for another N": (pool(ssm_state_indices=ints(B + 1, S)), ValueError,
        "ssm_state_indices: expected [N] or [N, S] with N = 2, got [3, 3]"),
    "indices of rank 0": (pool(ssm_state_indices=ints(())), ValueError,
        "ssm_state_indices: expected [N] or [N, S] with N = 2, got []"),
    "indices of rank 3": (pool(ssm_state_indices=ints(B, S, 1)), ValueError,
        "ssm_state_indices: expected [N] or [N, S] with N = 2, got [2, 3, 1]"),
    "fewer slots than tokens": (pool(ssm_state_indices=ints(B, T - 1)), ValueError,
        "ssm_state_indices: expected [N, S] with S >= 3, got [2, 2]"),
    "packed, no slot a sequence": (packed(initial_state=zeros(SLOTS, HV, V, K), ssm_state_indices=ints(3, 0)),
        ValueError, "ssm_state_indices: expected [N, S] with S >= 1, got [3, 0]"),
    "indices elsewhere": (pool(ssm_state_indices=ints(B, S).to(META)), ValueError,
        "ssm_state_indices: expected device cpu as q, got meta"),
    "accepted without indices": (dense(initial_state=STATE, num_accepted_tokens=ints(B)), ValueError,
        "num_accepted_tokens: expected ssm_state_indices of shape [N, S] beside it, got None"),
    "accepted with flat indices": (pool(ssm_state_indices=ints(B)), ValueError,
        "num_accepted_tokens: expected ssm_state_indices of shape [N, S] beside it, got [2]"),
    "accepted for another N": (pool(num_accepted_tokens=ints(B + 1)), ValueError,
        "num_accepted_tokens: expected shape [N] = [2], got [3]"),
    "accepted of rank 2": (pool(num_accepted_tokens=ints(B, 1)), ValueError,
        "num_accepted_tokens: expected shape [N] = [2], got [2, 1]"),
    "accepted as floats": (pool(num_accepted_tokens=zeros(B)), TypeError,
        "num_accepted_tokens: expected dtype int32 or int64, got float32"),
    "accepted as a number": (pool(num_accepted_tokens=1), TypeError,
        "num_accepted_tokens: expected a torch.Tensor, got int"),
    "in place on states that overlap": (dense(
        initial_state=zeros(1000).as_strided((B, HV, V, K), (3, 100, 8, 1)), inplace_final_state=True), ValueError,
        "initial_state: expected memory of its own for every element with inplace_final_state, got strides "
        "[3, 100, 8, 1] for shape [2, 4, 4, 8]"),
    "in place on a negative view": (dense(initial_state=torch._neg_view(STATE), inplace_final_state=True), ValueError,
        "initial_state: expected memory that holds its values with inplace_final_state, got a view with the negative "
        "bit; resolve_neg() makes one"),
    "accepted elsewhere": (pool(num_accepted_tokens=ints(B).to(META)), ValueError,
        "num_accepted_tokens: expected device cpu as q, got meta"),
}  # fmt: skip


@pytest.mark.usefixtures("no_backend")
@pytest.mark.parametrize("arguments, error, message", BAD_RECURRENT.values(), ids=BAD_RECURRENT)
def test_fused_recurrent_refuses(arguments, error, message) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        kda.fused_recurrent_kda(**arguments)


def test_inplace_state_with_one_sequence() -> None:
    state = zeros(HV, V, K).as_strided((1, HV, V, K), (0, V * K, K, 1))  # the stride of a single row means nothing
    one = {name: x[:1] for name, x in dense().items()}
    assert checked("fused_recurrent_kda", **one, initial_state=state, inplace_final_state=True).N == 1


def test_inplace_state_under_no_grad() -> None:
    arguments = pool(**PARAMETERS | {"A_log": zeros(HV, requires_grad=True)})
    with torch.no_grad():
        call = checked("fused_recurrent_kda", **arguments)
    assert call.initial_state is arguments["initial_state"]


def test_a_pool_of_inference_mode_is_written_inside_of_it_alone() -> None:
    with torch.inference_mode():
        arguments = pool()
        checked("fused_recurrent_kda", **arguments)
    with pytest.raises(ValueError, match=r"^initial_state: .*, got one of torch\.inference_mode\(\)"):
        checked("fused_recurrent_kda", **arguments)
