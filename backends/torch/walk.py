"""The walk over a call: some heads of some sequences at a time, piece by piece, the state carried along."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kda.backends.call import KdaCall, state_dtype

from .activation import Inputs
from .layout import Layout, Piece

Body = Callable[[Piece, Inputs, Tensor], tuple[dict[str, Tensor], Tensor]]
"""What is done with a piece: from its inputs and the states `[sequences, heads, K, V]` that enter it to named results
`[rows, heads, ...]` (a row a token, or a row a chunk) and the states that leave it."""


def walk(call: KdaCall, layout: Layout, states: Tensor, body: Body) -> tuple[dict[str, Tensor], Tensor]:
    """Run `body` over every piece, `layout.heads` key heads at a time, from `states` `[N, HV, K, V]`.

    Returns its results with all rows in the order of `layout.pieces`, `[rows, HV, ...]`, and the final states. Where
    autograd records, it keeps of each piece only what enters, and the backward pass computes the piece once more:
    memory stays near that of the inputs, and the forward pass stays in the cache.
    """
    inputs = call.q, call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias, states
    records = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if records and not torch._C._are_functorch_transforms_active():  # torch.func has no checkpoints
        body = partial(checkpoint, body, use_reentrant=False, preserve_rng_state=False)
    results: list[list[dict[str, Tensor]]] = []
    final: list[Tensor] = []
    # An autocast around the call must not reach in: the dtype of computation is part of what the operator promises.
    with torch.autocast(call.q.device.type, enabled=False):
        for pieces, S0 in _by_heads(call, layout, states):
            group: list[dict[str, Tensor]] = []
            ended = [S0[:0]]
            for unit, S in zip(layout.units, layout.split_states(S0), strict=True):
                for piece in unit.pieces:
                    if done := len(S) - piece.sequences:
                        ended.append(S[:done].clone())  # a slice would keep all of S in memory
                    result, S = body(piece, next(pieces), S[done:])
                    group.append(result)
                ended.append(S)
            results.append(group)
            final.append(layout.join_states(ended))
    names = results[0][0] if layout.pieces else ()
    joined = {name: _cat([_cat([result[name] for result in group], 0) for group in results], 1) for name in names}
    return joined, _cat(final, 1)


def _by_heads(call: KdaCall, layout: Layout, states: Tensor) -> Iterator[tuple[Iterator[Inputs], Tensor]]:
    """For each group of heads its inputs piece by piece, and its states."""
    heads, value_heads = layout.heads, layout.heads * call.HV // call.H
    q, k = (x.flatten(0, 1).split(heads, 1) for x in (call.q, call.k))
    v, g, beta = (x.flatten(0, 1).split(value_heads, 1) for x in (call.v, call.g, call.beta.unsqueeze(-1)))
    A_log = repeat(None) if call.A_log is None else call.A_log.split(value_heads)
    dt_bias = repeat(None) if call.dt_bias is None else call.dt_bias.view(call.HV, call.K).split(value_heads)
    for *tensors, a, b, S0 in zip(q, k, v, g, beta, A_log, dt_bias, states.split(value_heads, 1), strict=False):
        rows = zip(*(layout.split(x) for x in tensors), strict=True)
        yield (Inputs(*piece, a, b) for piece in rows), S0  # type: ignore[call-arg]  # five tensors a piece


def _cat(tensors: list[Tensor], dim: int) -> Tensor:
    """`torch.cat`, without its copy where there is nothing to join."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def initial_states(call: KdaCall) -> Tensor:
    """The states `[N, HV, K, V]` that the sequences start from, in the dtype of computation."""
    dtype = state_dtype(call.q.dtype)
    if call.initial_state is None:
        return torch.zeros(call.N, call.HV, call.K, call.V, dtype=dtype, device=call.q.device)
    return kv_layout(call, call.initial_state).to(dtype)


def kv_layout(call: KdaCall, state: Tensor) -> Tensor:
    """A state between the caller's layout and `[..., K, V]`; the map is its own inverse."""
    return state.transpose(-1, -2) if call.state_v_first else state
