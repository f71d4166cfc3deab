"""The chunked form: the stages M1-M4 composed over sequences, heads and chunks in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .call import Call
from .constants import CHUNK_SIZE
from .stages import STAGES, stages
from .threads import for_each

HEAD_GROUP = 4
"""Value heads that go through the stages together."""

BLOCK_TOKENS = 2048
"""Tokens times heads that are in work at once (per thread on the CPU): what bounds memory whatever the call's size."""


class Block(NamedTuple):
    """Consecutive chunks of some sequences and heads; tensors are `[chunks, sequences, heads, C, ...]`."""

    ns: Tensor  # [sequences] which ones
    heads: slice  # of the HV value heads
    chunks: Tensor  # [chunks] counted within the sequence
    rows: Tensor  # [chunks, sequences, C] token index
    valid: Tensor  # [chunks, sequences, C] False past a sequence's end
    tensors: dict[str, Tensor]  # every stage's, and o


def chunk_kda_golden(
    *args: Any, chunk_size: int = CHUNK_SIZE, dtype: torch.dtype = torch.float64, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Run `kda.chunk_kda`'s arguments (see `Call`) through M1-M4 in `dtype` (fp32 or fp64), any chunk size.

    Returns o (v's layout) and the final state (the caller's layout, None unless asked for), both in `dtype`.
    """
    call = Call(*args, **kwargs)
    o = torch.zeros(call.v.shape, dtype=dtype, device=call.v.device)

    def keep(block: Block) -> None:
        o[:, block.heads][block.rows[block.valid]] = block.tensors["o"].transpose(2, 3)[block.valid]

    state = _run(call, chunk_size, dtype, keep)
    return o.reshape(call.o_shape), call.to_kv(state).contiguous() if call.output_final_state else None


def chunk_kda_stages(
    *args: Any, chunk_size: int = CHUNK_SIZE, dtype: torch.dtype = torch.float64, **kwargs: Any
) -> dict[str, Tensor]:
    """Every tensor named in `STAGES` for the same call, as a table over all chunks in sequence order.

    `[NC, HV, C, ...]`, decay `[NC, HV, K]`, h `[NC, HV, K, V]`; NC sums ceil(length / C). Rows past a sequence's end
    are zero, except that G stays flat and Ainv has 1 on its diagonal. All in `dtype`, G in fp64.
    """
    call = Call(*args, **kwargs)
    C, K, V = chunk_size, call.K, call.V
    counts = _counts(call, C)
    first = counts.cumsum(0) - counts
    shapes = {"beta": (C,), "Akk": (C, C), "Aqk": (C, C), "Ainv": (C, C), "decay": (K,), "h": (K, V)}
    shapes |= {"u": (C, V), "v_new": (C, V)}
    tables = {
        name: call.v.new_zeros(
            int(counts.sum()), call.HV, *shapes.get(name, (C, K)), dtype=torch.float64 if name == "G" else dtype
        )
        for name in chain(*STAGES.values())
    }

    def keep(block: Block) -> None:
        at = first[block.ns] + block.chunks[:, None]
        for name, table in tables.items():
            table[:, block.heads][at] = block.tensors[name]

    _run(call, C, dtype, keep)
    return tables


def _run(call: Call, C: int, dtype: torch.dtype, keep: Callable[[Block], None]) -> Tensor:
    """Take every chunk through the stages, hand each block to `keep`, return the final states `[N, HV, K, V]`."""
    if call.initial_state is None:
        state = torch.zeros(call.N, call.HV, call.K, call.V, dtype=dtype, device=call.v.device)
    else:
        state = call.to_kv(call.initial_state).to(dtype).clone(memory_format=torch.contiguous_format)

    def work(group: tuple[Tensor, slice]) -> None:
        for block in _blocks(call, C, state, *group):
            keep(block)

    for_each(work, _groups(call, C), state.device)
    return state


def _counts(call: Call, C: int) -> Tensor:
    """Chunks in each sequence `[N]`."""
    return (call.lengths + C - 1) // C


def _groups(call: Call, C: int) -> Iterator[tuple[Tensor, slice]]:
    """Independent pieces of the call: sequences `[n]` with equally many chunks, and some of the value heads."""
    counts = _counts(call, C)
    for count in counts.unique():
        for ns in (counts == count).nonzero()[:, 0].split(max(1, BLOCK_TOKENS // (C * HEAD_GROUP))):
            for h in range(0, call.HV, HEAD_GROUP):
                yield ns, slice(h, min(h + HEAD_GROUP, call.HV))


def _blocks(call: Call, C: int, state: Tensor, ns: Tensor, heads: slice) -> Iterator[Block]:
    """Walk a group's chunks in order; `state` `[N, HV, K, V]` holds the states before them, in the end those after."""
    starts, lengths = call.starts[ns, None], call.lengths[ns, None]
    S = state[ns, heads]
    step = max(1, BLOCK_TOKENS // (C * HEAD_GROUP * len(ns)))
    for chunks in torch.arange(int(lengths[0] + C - 1) // C, device=state.device).split(step):
        within = chunks[:, None, None] * C + torch.arange(C, device=state.device)
        valid = within < lengths
        rows = (starts + within).where(valid, 0)
        tensors = _stages(call, heads, rows, valid, S)
        S = tensors["final_state"]
        yield Block(ns, heads, chunks, rows, valid, tensors)
    state[ns, heads] = S


def _stages(call: Call, heads: slice, rows: Tensor, valid: Tensor, S: Tensor) -> dict[str, Tensor]:
    """The four stages on one block, from the states `[sequences, heads, K, V]` that enter it."""
    v_heads = torch.arange(heads.start, heads.stop, device=S.device)
    q_heads = v_heads // (call.HV // call.H)
    padded = not valid.all()

    def chunked(x: Tensor, of: Tensor, dtype: torch.dtype = S.dtype) -> Tensor:
        """`[tokens, heads, ...]` -> `[chunks, sequences, heads, C, ...]`, zero past a sequence's end."""
        x = x[rows.unsqueeze(-1), of].to(dtype)
        if padded:
            x[~valid] = 0
        return x.transpose(2, 3).contiguous()

    q, k, v = chunked(call.q, q_heads), chunked(call.k, q_heads), chunked(call.v, v_heads)
    g, beta = chunked(call.g, v_heads, torch.float64), chunked(call.beta, v_heads)
    activation = call.activation.chunked(heads)
    return stages(q, k, v, g, beta, activation, S, valid[:, :, None] if padded else None)
