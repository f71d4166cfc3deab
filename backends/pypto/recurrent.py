"""A call of fused_recurrent_kda on its way to the kernel: which state each sequence reads, and where its states go.

The kernel is told both as rows of state tensors, int32 and -1 for none. They are computed from the caller's index
tensors by torch on their device; no index comes to the host.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kda.backends.call import KdaCall
from kda.backends.pool import known, put_back

from .build import run
from .config import config
from .host import bounds, initial_states, output, rows
from .kernels.recurrent import fused_recurrent_kda as recurrent_kernel


def fused_recurrent_kda(call: KdaCall) -> tuple[Tensor, Tensor | None]:
    """Run the call: o in v's shape and dtype and, if the call asks for them, the states as docs/abi.md lays them out.

    The kernel takes contiguous states in fp32: of others the named ones are gathered before and, in place, put back
    after it.
    """
    o = output(call)
    pool = initial_states(call) if call.initial_state is None else call.initial_state.resolve_neg()
    start = _start(call)
    as_it_is = pool.is_contiguous() and pool.dtype == torch.float32
    initial, kernel_start = (pool, start) if as_it_is else _gathered(pool, start)
    if call.inplace_final_state:
        target = _target_in_place(call, start)
        final, kernel_target = (pool, target) if as_it_is else _gathered(pool, target)
    else:
        final, kernel_target = _new_states(call, initial, kernel_start)
    inputs = [*rows(call), bounds(call), initial, kernel_start, kernel_target]
    run(recurrent_kernel, inputs, [o.view(-1, call.HV, call.V), final], config(call))
    if call.inplace_final_state and final is not pool:
        put_back(pool, target.flatten(), target.flatten() >= 0, final)
    if not call.output_final_state:
        return o, None
    return o, pool if call.inplace_final_state else final.to(call.final_dtype)


def _start(call: KdaCall) -> Tensor:
    """The state that each sequence starts from `[N]`."""
    slots = call.ssm_state_indices
    if slots is None:
        return torch.arange(call.N, dtype=torch.int32, device=call.q.device)
    named = known(call, slots)
    if slots.dim() == 1:
        return _rows(slots, named)
    if (accepted := call.num_accepted_tokens) is None:
        return _rows(slots[:, 0], named[:, 0])
    S = slots.shape[1]
    at = accepted.long().clamp(1, S).unsqueeze(1) - 1
    counted = (accepted >= 1) & (accepted <= S)
    return _rows(slots.gather(1, at)[:, 0], named.gather(1, at)[:, 0] & counted)


def _target_in_place(call: KdaCall, start: Tensor) -> Tensor:
    """Where the states go in the caller's tensor: `[N, 1]`, or `[N, S]` by token."""
    slots = call.ssm_state_indices
    if slots is None or slots.dim() == 1:
        return start.unsqueeze(1)
    token = torch.arange(slots.shape[1] + 1, device=slots.device)  # and a column for what comes behind the last slot
    live = F.pad(known(call, slots), (0, 1)) & (token < bounds(call).diff().unsqueeze(1))
    return _rows(F.pad(slots, (0, 1)), live)


def _new_states(call: KdaCall, initial: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """A new tensor for the states, and where they go in it: a row a sequence, or a row a token."""
    if call.state_per_token:
        token = torch.arange(call.T + 1, dtype=torch.int32, device=start.device)
        return initial.new_zeros(call.B * call.T, *initial.shape[1:]), bounds(call)[:-1, None] + token
    null = start < 0
    final = initial.index_select(0, start.clamp(min=0)).masked_fill_(null[:, None, None, None], 0.0)
    return final, _rows(torch.arange(call.N, device=start.device), ~null).unsqueeze(1)


def _rows(index: Tensor, valid: Tensor) -> Tensor:
    return index.where(valid, -1).to(torch.int32).contiguous()


def _gathered(pool: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """The states that `index` names, one after the other, and the index of each among them."""
    states = pool.index_select(0, index.flatten().clamp(min=0)).float()
    return states, _rows(torch.arange(index.numel(), device=index.device).view_as(index), index >= 0)
