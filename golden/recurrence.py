"""The token recurrence in fp64: the definition of the operator, which judges everything else.

S <- diag(exp g) S        S <- S + beta k (v - kᵀ S)ᵀ        o = qᵀ S          S: [K, V]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .call import Call


@dataclass(eq=False)
class RecurrentCall(Call):
    """The arguments of `kda.fused_recurrent_kda`: those of `chunk_kda` and the state pool's."""

    inplace_final_state: bool = False
    ssm_state_indices: Tensor | None = None  # [N], or [N, S] with one slot per drafted token
    num_accepted_tokens: Tensor | None = None  # [N], values 1..S

    def __post_init__(self) -> None:
        super().__post_init__()
        slots = self.ssm_state_indices
        if self.initial_state is None and (slots is not None or self.inplace_final_state):
            raise ValueError("initial_state: expected with ssm_state_indices or inplace_final_state, got None")
        if self.num_accepted_tokens is not None and (slots is None or slots.dim() != 2):
            raise ValueError("num_accepted_tokens: needs ssm_state_indices of shape [N, S]")
        if slots is not None and slots.dim() == 2 and (self.lengths > slots.shape[1]).any():
            raise ValueError(f"ssm_state_indices: {slots.shape[1]} slots for a sequence of {self.lengths.max()} tokens")

    def start_slots(self) -> Tensor | None:
        """Pool slot that each sequence starts from `[N]`; 0 and below are null."""
        slots = self.ssm_state_indices
        if slots is None or slots.dim() == 1:
            return slots
        accepted = self.num_accepted_tokens
        column = torch.zeros_like(slots[:, 0]) if accepted is None else accepted.to(slots) - 1
        return slots.gather(1, column.long()[:, None])[:, 0]


def recurrent_kda_golden(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Run `kda.fused_recurrent_kda`'s arguments (see `Call`, `RecurrentCall`) token by token in fp64.

    Returns o (v's layout) and the final state (the caller's layout), both fp64; the state is None unless asked for.
    No argument is written: under `inplace_final_state` an updated fp64 copy of the pool comes back.
    """
    call = RecurrentCall(*args, **kwargs)
    act = call.activation
    q, k = (x.double().repeat_interleave(call.HV // call.H, 1) for x in (call.q, call.k))
    q, k, v = act.queries(q), act.keys(k), call.v.double()
    decay, beta = act.log_decay(call.g).exp(), act.step_size(call.beta.double())

    device = v.device
    starts, lengths = call.starts, call.lengths
    S, slots = torch.zeros(call.N, call.HV, call.K, call.V, dtype=torch.float64, device=device), call.start_slots()
    pool = None if call.initial_state is None else call.to_kv(call.initial_state).double().clone()
    if slots is not None:
        live = slots > 0
        S[live] = pool[slots[live].long()]
        lengths = lengths * live
    elif pool is not None:
        S.copy_(pool)

    # One state per token is kept when each drafted token has a slot of its own.
    per_token = slots is not None and call.ssm_state_indices.dim() == 2
    token_states = S.new_zeros(len(v) if per_token and not call.inplace_final_state else 0, *S.shape[1:])

    # Longest first, so that the sequences still running at step t are always the first ones.
    order = lengths.argsort(descending=True, stable=True)
    S, starts, sorted_lengths = S[order], starts[order], lengths[order]
    o = torch.zeros_like(v)
    for t in range(max(sorted_lengths.tolist(), default=0)):
        n = int((sorted_lengths > t).sum())
        at, state = starts[:n] + t, S[:n]
        state *= decay[at].unsqueeze(-1)
        delta = beta[at].unsqueeze(-1) * (v[at] - _row(k[at], state))
        state += k[at].unsqueeze(-1) * delta.unsqueeze(-2)
        o[at] = _row(q[at], state)
        if per_token and call.inplace_final_state:
            slot = call.ssm_state_indices[order[:n], t].long()
            pool[slot[slot > 0]] = state[slot > 0]
        elif per_token:
            token_states[at] = state

    final = torch.empty_like(S)
    final[order] = S
    if call.inplace_final_state:
        if slots is None:
            pool = final
        elif not per_token:
            pool[slots[lengths > 0].long()] = final[lengths > 0]
        final = pool
    elif per_token:
        final = token_states
    wanted = call.output_final_state or call.inplace_final_state
    return o.reshape(call.o_shape), call.to_kv(final).contiguous() if wanted else None


def _row(x: Tensor, S: Tensor) -> Tensor:
    """xᵀ S per head: `[n, HV, K]`, `[n, HV, K, V]` -> `[n, HV, V]`."""
    return (x.unsqueeze(-2) @ S).squeeze(-2)
