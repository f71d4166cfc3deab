"""Checks that need values (`KDA_CHECK=1`): they copy from the device and wait for it, so they are for debugging."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kda.backends.call import KdaCall


def check_values(call: KdaCall) -> None:
    """Raise ValueError for the first argument whose values break the ABI, with the place of the offence."""
    for name in ("q", "k", "v", "beta", "A_log", "dt_bias"):
        _require(name, getattr(call, name), torch.isfinite, "finite values")
    if call.use_gate_in_kernel:
        _require("g", call.g, torch.isfinite, "finite values (raw gate)")
    else:
        _require("g", call.g, lambda g: g <= 0, "log decays in [-inf, 0]")
    if call.cu_seqlens is not None:
        _check_cu_seqlens(call.cu_seqlens.tolist(), call.T)
    if call.ssm_state_indices is None:
        _require("initial_state", call.initial_state, torch.isfinite, "finite values")
    else:
        _check_pool(call, call.ssm_state_indices)


def _require(name: str, x: Tensor | None, holds: Callable[[Tensor], Tensor], expected: str) -> None:
    if x is not None and not (good := holds(x)).all():
        where = (~good).nonzero()[0].tolist()
        raise ValueError(f"{name}: expected {expected}, got {x[tuple(where)].item()} at {where}")


def _check_cu_seqlens(cu: list[int], T: int) -> None:
    falls = [i for i in range(1, len(cu)) if cu[i] < cu[i - 1]]
    if cu[0] != 0 or falls or cu[-1] > T:
        where = f" (falls at index {falls[0]})" if falls else ""
        raise ValueError(f"cu_seqlens: expected 0 first, no decrease, and at most T = {T} last, got {cu}{where}")


def _check_pool(call: KdaCall, indices: Tensor) -> None:
    slots = call.initial_state.shape[0]
    _require("ssm_state_indices", indices, lambda i: i < slots, f"slots below {slots}")
    start = indices if indices.dim() == 1 else indices[:, 0]
    if indices.dim() == 2:
        S = indices.shape[1]
        if call.cu_seqlens is not None and (longest := int(call.cu_seqlens.diff().max())) > S:
            raise ValueError(f"ssm_state_indices: expected S >= the longest sequence {longest}, got S = {S}")
        if call.num_accepted_tokens is not None:
            accepted = call.num_accepted_tokens
            _require("num_accepted_tokens", accepted, lambda a: (a >= 1) & (a <= S), f"values in 1..{S}")
            start = indices.gather(1, accepted.long()[:, None] - 1)[:, 0]
    for slot in start[start > 0].tolist():
        _require(f"initial_state[{slot}]", call.initial_state[slot], torch.isfinite, "finite values")
    if call.inplace_final_state:
        slots, count = indices[indices > 0].unique(return_counts=True)
        if (repeated := slots[count > 1]).numel():
            raise ValueError("ssm_state_indices: expected distinct slots with inplace_final_state, got "
                             f"{repeated.tolist()} more than once")  # fmt: skip
