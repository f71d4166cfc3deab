"""The token recurrence in fp64: the definition of the operator, which judges everything else.

S <- diag(exp g) S        S <- S + beta k (v - kᵀ S)ᵀ        o = qᵀ S          S: [K, V]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .call import Call
from .threads import for_each

HEAD_GROUP = 4
"""Value heads that one thread takes through the tokens together."""


@dataclass(eq=False)
class RecurrentCall(Call):
    """The arguments of `kda.fused_recurrent_kda`: those of `chunk_kda` and the state pool's."""

    num_accepted_tokens: Tensor | None = None  # [N], values 1..S; a sequence of another one starts from no slot
    intermediate_state_indices: Tensor | None = field(default=None, kw_only=True)  # for what the golden writes not

    def __post_init__(self) -> None:
        slots = self.ssm_state_indices
        if self.num_accepted_tokens is not None and (slots is None or slots.dim() != 2):
            raise ValueError("num_accepted_tokens: needs ssm_state_indices of shape [N, S]")
        super().__post_init__()

    def start_slots(self) -> Tensor | None:
        """As in `Call`; with indices `[N, S]`, the slot of the last accepted token."""
        slots = self._slots()
        if slots is None or slots.dim() == 1:
            return slots
        if self.num_accepted_tokens is None:
            return slots[:, 0]
        accepted, S = self.num_accepted_tokens.long(), slots.shape[1]
        counted = (accepted >= 1) & (accepted <= S)
        return slots.gather(1, accepted.clamp(1, S)[:, None] - 1)[:, 0].where(counted, -1)

    def token_slots(self) -> Tensor | None:
        """Pool slot that the state after each token goes to `[N, S]`, where every drafted token has its own."""
        slots = self._slots()
        return None if slots is None or slots.dim() == 1 else slots


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
    o = torch.zeros_like(v)

    S = call.start_states(torch.float64)
    pool = S if call.initial_state is None else call.to_kv(call.initial_state).double().clone()
    token_slots = call.token_slots()
    token_states = None
    if token_slots is not None and not call.inplace_final_state:
        token_states = S.new_zeros(len(v), *S.shape[1:])

    # Longest first, so that the sequences still running at step t are always the first ones.
    lengths, order = call.lengths.sort(descending=True, stable=True)
    starts, S = call.starts[order], S[order]
    steps = torch.arange(int(lengths.max()) if call.N else 0, device=v.device)
    running = (call.N - torch.searchsorted(lengths.flip(0), steps, right=True)).tolist()

    def run(h: slice) -> None:
        states = S[:, h].contiguous()
        for t, n in enumerate(running):
            at, state = starts[:n] + t, states[:n]
            state *= decay[at, h].unsqueeze(-1)
            delta = beta[at, h].unsqueeze(-1) * (v[at, h] - _read(state, k[at, h]))
            state += k[at, h].unsqueeze(-1) * delta.unsqueeze(-2)
            o[at, h] = _read(state, q[at, h])
            if token_states is not None:
                token_states[at, h] = state
            elif token_slots is not None and t < token_slots.shape[1]:
                slot = token_slots[order[:n], t]
                pool[slot[slot >= 0], h] = state[slot >= 0]
        S[:, h] = states

    for_each(run, (slice(h, h + HEAD_GROUP) for h in range(0, call.HV, HEAD_GROUP)), v.device)

    final = torch.empty_like(S)
    final[order] = S
    if token_states is not None:
        final = token_states
    elif token_slots is not None:
        final = pool
    else:
        final = call.final_states(final)
    wanted = call.output_final_state or call.inplace_final_state
    return o.reshape(call.o_shape), call.to_kv(final).contiguous() if wanted else None


def _read(S: Tensor, x: Tensor) -> Tensor:
    """xᵀ S per head: `[n, heads, K, V]`, `[n, heads, K]` -> `[n, heads, V]`."""
    return (x.unsqueeze(-2) @ S).squeeze(-2)
