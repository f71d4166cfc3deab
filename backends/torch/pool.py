"""The state pool of a decoding engine: where sequences take their states from and leave them.

Slot 0 and negative indices are null: a sequence that starts from one takes no part in the call, and a state that
belongs to one is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kda.backends.call import KdaCall, state_dtype

from .walk import kv_layout


class Pool:
    """The caller's states `[slots, HV, V, K]`, as `ssm_state_indices` addresses them.

    Attributes:
        per_token: every token has a slot of its own, not only every sequence.
        lengths: tokens of each sequence, 0 for one that takes no part.
    """

    def __init__(self, call: KdaCall, states: Tensor, indices: Tensor, starts: list[int], lengths: list[int]) -> None:
        """Reads the indices from the device.

        Raises ValueError where they are too few or past the pool, or where `num_accepted_tokens` is not in 1..S.
        """
        self._call, self._states = call, states
        self.per_token = call.state_per_token
        slots = indices.tolist()
        if self.per_token:
            accepted = _accepted(call, indices.shape[1], max(lengths, default=0))
            self._start = [of_sequence[a - 1] for of_sequence, a in zip(slots, accepted, strict=True)]
        else:
            self._start = slots
        self.lengths = [length if slot > 0 else 0 for length, slot in zip(lengths, self._start, strict=True)]
        # Row of the states that the call computes -> the slot that it belongs to.
        if self.per_token:
            self._slots = {starts[n] + t: slots[n][t] for n in range(call.N) for t in range(self.lengths[n])}
        else:
            self._slots = {n: slots[n] for n in range(call.N) if self.lengths[n]}
        size = len(states)
        if (highest := max([*self._start, *self._slots.values()], default=0)) >= size:
            raise ValueError(f"ssm_state_indices: expected slots below {size}, got {highest}")

    def read(self) -> Tensor:
        """The states `[N, HV, K, V]` that the sequences start from; 0 for a null slot, which is not read."""
        call = self._call
        live = {n: slot for n, slot in enumerate(self._start) if slot > 0}
        states = kv_layout(call, self._states.index_select(0, self._tensor(live.values())))
        start = torch.zeros(call.N, call.HV, call.K, call.V, dtype=state_dtype(call.q.dtype), device=states.device)
        return start.index_copy_(0, self._tensor(live), states.to(start.dtype))

    def write(self, states: Tensor) -> None:
        """Leave `states`, a row per sequence or per token `[rows, HV, K, V]`, in their slots of the caller's tensor."""
        live = {row: slot for row, slot in self._slots.items() if slot > 0}
        rows = kv_layout(self._call, states.index_select(0, self._tensor(live)))
        self._states.index_copy_(0, self._tensor(live.values()), rows.to(self._states.dtype))

    def _tensor(self, rows: Iterable[int]) -> Tensor:
        return torch.tensor(list(rows), dtype=torch.long, device=self._states.device)


def _accepted(call: KdaCall, S: int, longest: int) -> list[int]:
    """How many drafted tokens of the step before each sequence has kept: it starts from the last one's state."""
    if longest > S:
        raise ValueError(f"ssm_state_indices: expected S >= the longest sequence {longest}, got S = {S}")
    if call.num_accepted_tokens is None:
        return [1] * call.N
    accepted = call.num_accepted_tokens.tolist()
    if wrong := [a for a in accepted if not 1 <= a <= S]:
        raise ValueError(f"num_accepted_tokens: expected values in 1..{S}, got {wrong[0]}")
    return accepted
