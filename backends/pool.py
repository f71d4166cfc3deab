"""The states of a call by slot, on the device: which one each sequence starts from, and where its last one goes.

No value is read on the host, so that a call can be captured in a CUDA graph. A slot that is null, or that is not of the
pool, is neither read nor written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kda.backends.call import KdaCall, state_dtype

Result = tuple[Tensor, Tensor | None]


def known(call: KdaCall, slots: Tensor) -> Tensor:
    """Which of the slots hold a state of the call's pool."""
    assert call.initial_state is not None
    return (slots >= call.first_slot) & (slots < call.initial_state.shape[0])


def lengths(call: KdaCall) -> Tensor:
    """Tokens of each sequence `[N]`."""
    if call.cu_seqlens is None:
        return torch.full((call.N,), call.T, device=call.q.device)
    return call.cu_seqlens.diff()


def start_states(call: KdaCall) -> Tensor:
    """The states that the sequences start from, in the caller's layout and dtype of computation, a row each `[N, ...]`.

    0 for a null slot, and where `has_initial_state` is False. Not for indices `[N, S]`.
    """
    dtype, state = state_dtype(call.q.dtype), call.initial_state
    if state is None:
        return call.q.new_zeros(call.N, *call.state_shape, dtype=dtype)
    there = call.has_initial_state
    if (slots := call.ssm_state_indices) is not None:
        live = known(call, slots)
        state = state.index_select(0, slots.where(live, 0).long())
        there = live if there is None else live & there
    state = state.to(dtype)
    return state if there is None else torch.where(_by_row(there), state, 0.0)


def put_back(pool: Tensor, slots: Tensor, live: Tensor, states: Tensor) -> None:
    """Write row i of `states` to slot `slots[i]` of the pool where it is live; no two live rows have one slot."""
    if not len(slots):
        return
    # A row that is not live writes what the first live one writes, to the same slot; without any, slot 0 stays.
    row = torch.arange(len(slots), device=slots.device).where(live, live.to(torch.uint8).argmax())
    live = live[row]
    slot = slots[row].where(live, 0).long()
    pool.index_copy_(0, slot, torch.where(_by_row(live), states[row].to(pool.dtype), pool[slot]))


def with_dense_states(call: KdaCall, run: Callable[[KdaCall], Result]) -> Result:
    """Run a call of chunk_kda by a host that knows one state a sequence, in the dtype of computation, and no pool."""
    if call.dense_states:
        return run(call)
    slots, state = call.ssm_state_indices, call.initial_state
    dense = replace(
        call, initial_state=start_states(call), ssm_state_indices=None, has_initial_state=None, null_slot=0,
        inplace_final_state=False, output_final_state=call.output_final_state or call.inplace_final_state,
        checkpoint_offsets=_live_offsets(call), memo=call.memo.setdefault(__name__, {}),
    )  # fmt: skip
    o, final = run(dense)
    live = None if slots is None else known(call, slots)
    if live is not None:
        o = o.masked_fill_(_null_tokens(call, live), 0.0)
    if final is None or state is None:
        return o, None
    if call.inplace_final_state:
        ran = lengths(call) > 0
        rows = torch.arange(call.N, device=call.q.device) if slots is None else slots
        put_back(state, rows, ran if live is None else ran & live, final)
        return o, state if call.output_final_state else None
    final = final if live is None else final.masked_fill(~_by_row(live), 0.0)
    return o, final.to(call.final_dtype)


def checkpoints_without_tokens(call: KdaCall) -> None:
    """The snapshots of a call whose sequences are all empty: the states that they start from."""
    if call.checkpoint_states is not None and (offsets := _live_offsets(call)) is not None:
        rows = torch.arange(call.N, device=call.q.device)
        put_back(call.checkpoint_states, rows, offsets == 0, start_states(call))


def _live_offsets(call: KdaCall) -> Tensor | None:
    """`checkpoint_offsets`, -1 for sequences that take no part."""
    offsets, slots = call.checkpoint_offsets, call.ssm_state_indices
    return offsets if offsets is None or slots is None else offsets.where(known(call, slots), -1)


def _null_tokens(call: KdaCall, live: Tensor) -> Tensor:
    """`[B, T, 1, 1]`: the tokens of sequences that take no part."""
    if call.cu_seqlens is None:
        return ~live[:, None, None, None]
    token = torch.arange(call.T, device=live.device)
    sequence = torch.searchsorted(call.cu_seqlens[1:].contiguous(), token, right=True).clamp(max=call.N - 1)
    return ~live[sequence][None, :, None, None]


def _by_row(x: Tensor) -> Tensor:
    """`[N]` as it broadcasts against states."""
    return x[:, None, None, None]
