"""The blocks of a call: how its sequences, heads and chunks go through the stages in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .call import Call

HEAD_GROUP = 4
"""Value heads that go through the stages together."""

BLOCK_TOKENS = 2048
"""Tokens times heads that are in work at once (per thread on the CPU): what bounds memory whatever the call's size."""

Tables = dict[str, Tensor]


class Block(NamedTuple):
    """Consecutive chunks of some sequences and heads; their tensors are `[chunks, sequences, heads, C, ...]`."""

    ns: Tensor  # [sequences] which ones
    heads: slice  # of the HV value heads
    chunks: Tensor  # [chunks] counted within the sequence
    rows: Tensor  # [chunks, sequences, C] token index
    inside: Tensor  # [chunks, sequences, C] False past a sequence's end
    valid: Tensor | None  # the same as the stages take it, [chunks, sequences, 1, C]; None if it is True everywhere

    def gather(self, x: Tensor, HV: int, dtype: torch.dtype) -> Tensor:
        """`[tokens, heads, ...]` -> `[chunks, sequences, value heads, C, ...]`, zero past a sequence's end."""
        of = torch.arange(self.heads.start, self.heads.stop, device=x.device) // (HV // x.shape[1])
        x = x[self.rows.unsqueeze(-1), of].to(dtype)
        if self.valid is not None:
            x[~self.inside] = 0
        return x.transpose(2, 3).contiguous()

    def scatter(self, x: Tensor, into: Tensor) -> None:
        """Put `[chunks, sequences, value heads, C, ...]` into `[tokens, HV, ...]`, but for the rows past an end."""
        into[:, self.heads][self.rows[self.inside]] = x.transpose(2, 3)[self.inside]


def groups(call: Call, C: int) -> Iterator[tuple[Tensor, slice]]:
    """Independent pieces of the call: sequences `[n]` with equally many chunks, and some of the value heads."""
    counts = _counts(call, C)
    for count in counts.unique():
        for ns in (counts == count).nonzero()[:, 0].split(max(1, BLOCK_TOKENS // (C * HEAD_GROUP))):
            for h in range(0, call.HV, HEAD_GROUP):
                yield ns, slice(h, min(h + HEAD_GROUP, call.HV))


def blocks(call: Call, C: int, ns: Tensor, heads: slice) -> Iterator[Block]:
    """The blocks of one of the `groups`, in the order of their chunks."""
    starts, lengths = call.starts[ns, None], call.lengths[ns, None]
    step = max(1, BLOCK_TOKENS // (C * HEAD_GROUP * len(ns)))
    count = int(lengths[0] + C - 1) // C
    for first in range(0, count, step):
        chunks = torch.arange(first, min(first + step, count), device=starts.device)
        within = chunks[:, None, None] * C + torch.arange(C, device=starts.device)
        inside = within < lengths
        rows = (starts + within).where(inside, 0)
        yield Block(ns, heads, chunks, rows, inside, None if inside.all() else inside[:, :, None])


def block_inputs(call: Call, block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g and beta of one block as `stages` takes them: in `dtype`, g in fp64."""
    q, k, v, beta = (block.gather(x, call.HV, dtype) for x in (call.q, call.k, call.v, call.beta))
    return q, k, v, block.gather(call.g, call.HV, torch.float64), beta


def states(call: Call, given: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A state for each sequence `[N, HV, K, V]`: a copy of the given ones (the caller's layout), or zeros."""
    if given is None:
        return torch.zeros(call.N, call.HV, call.K, call.V, dtype=dtype, device=call.v.device)
    return call.to_kv(given.detach()).to(dtype).clone(memory_format=torch.contiguous_format)


def chunk_tables(
    call: Call, C: int, dtype: torch.dtype, axes: Mapping[str, str]
) -> tuple[Tables, Callable[[Block, Tables], None]]:
    """Tables `[NC, HV, ...]` of zeros over all chunks in sequence order, and what puts a block's tensors into them.

    `axes` names the tables and says which axes follow, each by its letter: C, K or V. G is fp64 whatever the dtype.
    """
    counts = _counts(call, C)
    first = counts.cumsum(0) - counts
    sizes = {"C": C, "K": call.K, "V": call.V}
    tables = {
        name: call.v.new_zeros(
            (int(counts.sum()), call.HV, *(sizes[axis] for axis in its)), dtype=torch.float64 if name == "G" else dtype
        )
        for name, its in axes.items()
    }

    def keep(block: Block, tensors: Tables) -> None:
        at = first[block.ns] + block.chunks[:, None]
        for name, table in tables.items():
            table[:, block.heads][at] = tensors[name].to(table.dtype)

    return tables, keep


def _counts(call: Call, C: int) -> Tensor:
    """Chunks in each sequence `[N]`."""
    return (call.lengths + C - 1) // C
