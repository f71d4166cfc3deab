"""fused_recurrent_kda: token by token.

    S <- diag(exp g) S        S <- S + beta k (v - kᵀ S)ᵀ        o = qᵀ S

The old state is read by one matmul a token: the decay moves into k and q, and what the token itself adds to o is
(q . k) beta (v - kᵀ S).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kda.backends.call import KdaCall

from .activation import Inputs, activate
from .layout import Layout, Piece, sequences
from .pool import Pool
from .snapshots import write_drafts
from .walk import initial_states, kv_layout, walk

STATES_IN_CACHE, STATES_ON_DEVICE = 64, 1 << 16
"""States (sequences times heads) that are carried together: on a CPU near its cache, elsewhere what fills a device."""

TOKENS_ON_CPU, TOKENS_ON_DEVICE = 1 << 10, 1 << 13
"""Tokens times heads of a piece; where autograd records, so many states are in memory at a time."""


def fused_recurrent_kda(call: KdaCall) -> tuple[Tensor, Tensor | None]:
    """Run the call: o `[B, T, HV, V]` in v's dtype and, if the call asks for them, states in the caller's layout.

    In place, the states are written to `call.initial_state`, which is what is returned. Else they are new: the final
    ones, a row per sequence, or with `ssm_state_indices` `[N, S]` those after every token, a row per token of the flat
    batch. Raises ValueError for wrong values of `cu_seqlens`.
    """
    starts, lengths = sequences(call)
    initial, indices = call.initial_state, call.ssm_state_indices
    pool = None if initial is None or indices is None else Pool(call, initial, indices, starts, lengths)
    lengths = lengths if pool is None else pool.lengths
    first = initial_states(call) if pool is None else pool.read()
    per_token = call.intermediate_states_buffer is not None or call.state_per_token
    o, states = _run(call, starts, lengths, first, per_token)
    if call.intermediate_states_buffer is not None:
        write_drafts(call, starts, lengths, kv_layout(call, states))
        states = _last(states, first, starts, lengths)
    if not call.inplace_final_state:
        return o, kv_layout(call, states).to(call.final_dtype).contiguous() if call.output_final_state else None
    if pool is not None:
        pool.write(states)
    elif initial is not None:
        initial.copy_(kv_layout(call, states))
    return o, initial if call.output_final_state else None


def _last(states: Tensor, first: Tensor, starts: list[int], lengths: list[int]) -> Tensor:
    """The final states, from those after every token; of an empty sequence, the one that it starts from."""
    ran = [n for n, length in enumerate(lengths) if length]
    final = first.clone()
    final[ran] = states[[starts[n] + lengths[n] - 1 for n in ran]]
    return final


def _run(
    call: KdaCall, starts: list[int], lengths: list[int], states: Tensor, per_token: bool
) -> tuple[Tensor, Tensor]:
    """o and, from `states` `[N, HV, K, V]`, the final states or those after each token `[B * T, HV, K, V]`."""

    def body(piece: Piece, x: Inputs, S: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        q, k, v, g, beta = (table.flatten(1, 3) for table in activate(call, piece, x))
        pairs = S.shape[:2]
        o, after = [], []
        for o_t, S_t in _steps(q, k, v, g, beta, S.flatten(0, 1)):
            S = S_t
            o.append(o_t)
            if per_token:
                after.append(S_t)
        results = {"o": torch.stack(o).to(call.v.dtype)} | ({"S": torch.stack(after)} if per_token else {})
        rows = {name: result.unflatten(1, pairs).flatten(0, 1) for name, result in results.items()}
        return rows, S.unflatten(0, pairs)

    on_cpu = call.q.device.type == "cpu"
    layout = Layout(call, starts, lengths, chunk=lambda longest: 1,
                    pairs=lambda C: STATES_IN_CACHE if on_cpu else STATES_ON_DEVICE,
                    tokens=TOKENS_ON_CPU if on_cpu else TOKENS_ON_DEVICE)  # fmt: skip
    results, final = walk(call, layout, states, body)
    o = layout.by_token(results["o"]).view(call.v.shape) if results else call.v.new_zeros(call.v.shape)
    if per_token:
        final = layout.by_token(results["S"]) if results else states.new_zeros(layout.total, *states.shape[1:])
    return o, final


def _steps(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """o `[n, V]` and the state `[n, K, V]` after each token; q, k, v, g, beta are `[tokens, n, dim]`."""
    decay = g.exp()
    decayed = torch.stack([k * decay, q * decay], -2)
    qk = (q * k).sum(-1, keepdim=True)
    by_token = (x.unbind() for x in (decayed, k.unsqueeze(-1), decay.unsqueeze(-1), qk, v, beta))
    for decayed_t, k_t, decay_t, qk_t, v_t, beta_t in zip(*by_token, strict=True):
        kS, qS = torch.bmm(decayed_t, S).unbind(1)
        delta = beta_t * (v_t - kS)
        S = torch.addcmul(S * decay_t, k_t, delta.unsqueeze(1))
        yield torch.addcmul(qS, qk_t, delta), S
