"""The chunked form: the stages M1-M4 composed over sequences, heads and chunks in bounded memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import stages
from .call import Call
from .constants import CHUNK_SIZE

BLOCK_TOKENS = 4096
"""Tokens times heads that are in work at once; bounds memory whatever the call's size."""


class Block(NamedTuple):
    """Some consecutive chunks of some sequences, all heads; tensors are `[chunks, sequences, HV, C, ...]`."""

    rows: Tensor  # [chunks, sequences, C] token index
    valid: Tensor  # [chunks, sequences, C] False past a sequence's end
    table: Tensor  # [chunks, sequences] position in the table of all chunks
    tensors: dict[str, Tensor]  # every stage's, and o


def chunk_kda_golden(
    *args: Any, chunk_size: int = CHUNK_SIZE, dtype: torch.dtype = torch.float64, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Run `kda.chunk_kda`'s arguments (see `Call`) through M1-M4 in `dtype` (fp32 or fp64), any chunk size.

    Returns o (v's layout) and the final state (the caller's layout, None unless asked for), both in `dtype`.
    """
    call = Call(*args, **kwargs)
    state = _initial_state(call, dtype)
    o = torch.zeros(call.v.shape, dtype=dtype, device=call.v.device)
    for block in _blocks(call, state, chunk_size):
        o[block.rows[block.valid]] = block.tensors["o"].movedim(-2, 2)[block.valid]
    final = call.to_kv(state).contiguous() if call.output_final_state else None
    return o.reshape(call.o_shape), final


def chunk_kda_stages(
    *args: Any, chunk_size: int = CHUNK_SIZE, dtype: torch.dtype = torch.float64, **kwargs: Any
) -> dict[str, Tensor]:
    """Every tensor named in `STAGES` for the same call, as a table over all chunks in sequence order.

    `[NC, HV, C, ...]`, decay `[NC, HV, K]`, h `[NC, HV, K, V]`; NC sums ceil(length / C). Rows past a sequence's end
    are zero, except that G stays flat and Ainv has 1 on its diagonal. All in `dtype`, G in fp64.
    """
    call = Call(*args, **kwargs)
    chunks = sum(-(-length // chunk_size) for length in call.lengths)
    tables: dict[str, Tensor] = {}
    for block in _blocks(call, _initial_state(call, dtype), chunk_size):
        for name in (name for names in stages.STAGES.values() for name in names):
            value = block.tensors[name]
            if name not in tables:
                tables[name] = value.new_zeros(chunks, *value.shape[2:])
            tables[name][block.table] = value
    return tables


def _initial_state(call: Call, dtype: torch.dtype) -> Tensor:
    """`[N, HV, K, V]`, a copy, as the blocks carry it forward in place."""
    if call.initial_state is None:
        return torch.zeros(call.N, call.HV, call.K, call.V, dtype=dtype, device=call.v.device)
    return call.to_kv(call.initial_state).to(dtype, copy=True)


def _blocks(call: Call, state: Tensor, C: int) -> Iterator[Block]:
    """Walk all sequences' chunks; `state` `[N, HV, K, V]` holds the states reached so far, in the end the final ones.

    Sequences with equally many chunks go together, as far as BLOCK_TOKENS allows.
    """
    device = call.v.device
    starts = torch.tensor(call.starts, device=device, dtype=torch.long)
    lengths = torch.tensor(call.lengths, device=device, dtype=torch.long)
    counts = [-(-length // C) for length in call.lengths]
    first = torch.tensor([0, *counts], device=device).cumsum(0)
    by_count: dict[int, list[int]] = defaultdict(list)
    for n, count in enumerate(counts):
        by_count[count].append(n)

    for count, members in by_count.items():
        together = max(1, BLOCK_TOKENS // (C * call.HV))
        for ns in torch.tensor(members, device=device).split(together):
            step = max(1, together // len(ns))
            for c0 in range(0, count, step):
                c = torch.arange(c0, min(c0 + step, count), device=device)[:, None]
                within = c[..., None] * C + torch.arange(C, device=device)
                valid = within < lengths[ns, None]
                rows = (starts[ns, None] + within).where(valid, 0)
                tensors = _run(call, rows, valid, state[ns])
                state[ns] = tensors.pop("final_state")
                yield Block(rows, valid, first[ns] + c, tensors)


def _run(call: Call, rows: Tensor, valid: Tensor, state: Tensor) -> dict[str, Tensor]:
    """The four stages on one block, from the states `[sequences, HV, K, V]` that enter it."""
    dtype, repeat, whole = state.dtype, call.HV // call.H, bool(valid.all())

    def chunked(x: Tensor, dtype: torch.dtype) -> Tensor:
        """`[tokens, heads, ...]` -> `[chunks, sequences, heads, C, ...]`, zero past a sequence's end."""
        x = x[rows].transpose(2, 3)
        if not whole:
            x = x.where(valid[:, :, None].reshape(*valid.shape[:2], 1, -1, *[1] * (x.dim() - 4)), 0)
        return x.to(dtype)

    q, k = (chunked(x, dtype).repeat_interleave(repeat, 2) for x in (call.q, call.k))
    v, g, beta = chunked(call.v, dtype), chunked(call.g, torch.float64), chunked(call.beta, dtype)
    a = stages.m1(q, k, g, beta, call.activation.chunked(), None if whole else valid[:, :, None])
    b = stages.m2(a.q, a.k, a.beta, a.G)
    c = stages.m3(a.q, a.k, v, a.beta, a.G, b.Ainv)
    d = stages.m4(b.Aqk, c.qg, c.kg, c.decay, c.w, c.u, state)
    return a._asdict() | b._asdict() | c._asdict() | d._asdict()
