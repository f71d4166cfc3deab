"""The state pool of a decoding engine: where sequences take their states from and leave them.

The null slot and indices that name no slot are null: a sequence that starts from one takes no part in the call, and a
state that belongs to one is dropped. So is a count of accepted tokens out of 1..S, and the state of a token past S.
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
        """Reads the indices from the device."""
        self._call, self._states = call, states
        self.per_token = call.state_per_token
        known = range(call.first_slot, len(states))
        slots = [[slot if slot in known else None for slot in of] for of in indices.view(call.N, -1).tolist()]
        if call.num_accepted_tokens is None:
            self._start = [of[0] for of in slots]
        else:
            accepted = call.num_accepted_tokens.tolist()
            self._start = [of[a - 1] if 1 <= a <= len(of) else None for of, a in zip(slots, accepted, strict=True)]
        self.lengths = [0 if slot is None else length for length, slot in zip(lengths, self._start, strict=True)]
        # Row of the states that the call computes -> the slot that it belongs to.
        if self.per_token:
            tokens = [min(length, len(of)) for length, of in zip(self.lengths, slots, strict=True)]
            named = {starts[n] + t: slots[n][t] for n in range(call.N) for t in range(tokens[n])}
        else:
            named = {n: slots[n][0] for n in range(call.N) if self.lengths[n]}
        self._slots = {row: slot for row, slot in named.items() if slot is not None}

    def read(self) -> Tensor:
        """The states `[N, HV, K, V]` that the sequences start from; 0 for a null slot, which is not read."""
        call = self._call
        live = {n: slot for n, slot in enumerate(self._start) if slot is not None}
        states = kv_layout(call, self._states.index_select(0, self._tensor(live.values())))
        start = torch.zeros(call.N, call.HV, call.K, call.V, dtype=state_dtype(call.q.dtype), device=states.device)
        return start.index_copy_(0, self._tensor(live), states.to(start.dtype))

    def write(self, states: Tensor) -> None:
        """Leave `states`, a row per sequence or per token `[rows, HV, K, V]`, in their slots of the caller's tensor."""
        rows = kv_layout(self._call, states.index_select(0, self._tensor(self._slots)))
        self._states.index_copy_(0, self._tensor(self._slots.values()), rows.to(self._states.dtype))

    def _tensor(self, rows: Iterable[int]) -> Tensor:
        return torch.tensor(list(rows), dtype=torch.long, device=self._states.device)
