"""Which tokens are worked on together: sequences of any lengths, cut into rectangles of chunks by sequences.

Neighbours in order of length form a unit, and a unit is walked from its first chunk to its last in pieces. The same
sequences are active throughout a piece, so its tensors are full rectangles; as shorter sequences come first in a
unit, the active ones are always the last of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kda.backends.call import KdaCall


@dataclass(frozen=True, eq=False)
class Piece:
    """Some consecutive chunks of the last `sequences` sequences of a unit."""

    chunks: int
    sequences: int
    C: int  # tokens per chunk
    first: int  # the first of the chunks, counted from the sequences' starts
    tokens: Tensor  # [chunks * sequences * C] int64, where each row lies in the flat batch
    valid: Tensor | None  # [chunks, sequences, C] False past a sequence's end; None if all rows are tokens

    def to_table(self, rows: Tensor) -> Tensor:
        """Rows `[chunks * sequences * C, heads, dim]` in chunk layout `[chunks, sequences, heads, C, dim]`."""
        return rows.unflatten(0, (self.chunks, self.sequences, self.C)).transpose(2, 3)

    def to_rows(self, table: Tensor) -> Tensor:
        """The inverse of `to_table`."""
        return table.transpose(2, 3).flatten(0, 2)


@dataclass(frozen=True, eq=False)
class Unit:
    """Sequences that are walked together, in ascending order of length, and the pieces of the walk."""

    sequences: list[int]
    pieces: list[Piece]


class Layout:
    """The units of a call, and the ways between the caller's order of tokens and states and theirs.

    Attributes:
        heads: how many key heads are worked on at a time, with the value heads that read them.
        units: all sequences, those without tokens too.
    """

    def __init__(
        self,
        call: KdaCall,
        starts: list[int],
        lengths: list[int],
        *,
        chunk: Callable[[int], int],
        pairs: Callable[[int], int],
        tokens: int,
    ) -> None:
        """Sequence n is `starts[n] : starts[n] + lengths[n]` of the flat batch `[B * T]`.

        `chunk`: from a unit's longest sequence to its chunk length. `pairs`: from there to how many sequences times
        value heads make a unit. `tokens`: how many tokens times value heads make a piece.
        """
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        groups = min(call.H, -(-call.HV // pairs(chunk(max(lengths, default=0)))))
        self.heads = -(-call.H // groups)
        value_heads = self.heads * call.HV // call.H
        self.total = call.B * call.T
        self.units: list[Unit] = []
        while order:
            # Chunks of one length to a unit, that which its sequences would have alone: the last bits depend on it.
            C = chunk(lengths[order[-1]])
            size = max(1, pairs(C) // value_heads)
            alike = [n for n in order[-size:] if chunk(lengths[n]) == C]
            order, members = order[: -len(alike)], alike
            bounds = [starts[n] for n in members], [lengths[n] for n in members]
            self.units.append(Unit(members, list(_pieces(*bounds, C, tokens // value_heads, call.q.device))))
        self.pieces = [piece for unit in self.units for piece in unit.pieces]
        members = [n for unit in self.units for n in unit.sequences]
        self._order = torch.tensor(members, dtype=torch.long, device=call.q.device)

    def split(self, x: Tensor) -> Iterator[Tensor]:
        """The rows of x `[total, heads, dim]` piece by piece, each gathered when it is asked for.

        Where autograd records, one gather serves all pieces: the gradient of a gather is as large as x, so that one
        per piece would make the backward pass quadratic in T.
        """
        if torch.is_grad_enabled() and x.requires_grad and self.pieces:
            tokens = [piece.tokens for piece in self.pieces]
            return iter(x.index_select(0, torch.cat(tokens)).split([len(t) for t in tokens]))
        return (x.index_select(0, piece.tokens) for piece in self.pieces)

    def by_token(self, rows: Tensor) -> Tensor:
        """Rows of all pieces in order `[rows, heads, ...]` as `[total, heads, ...]`, 0 for a token of no sequence."""
        past = [piece.tokens if piece.valid is None else piece.tokens.where(piece.valid.flatten(), self.total)
                for piece in self.pieces]  # fmt: skip
        tokens = rows.new_zeros(self.total + 1, *rows.shape[1:])
        return tokens.index_copy_(0, torch.cat(past), rows)[:-1]

    def by_chunk(self, rows: Tensor) -> Tensor:
        """Rows of all pieces, one per chunk and sequence, in order of the sequences and their chunks."""
        place = [
            torch.tensor(unit.sequences[-piece.sequences :], device="cpu") * self.total
            + torch.arange(piece.first, piece.first + piece.chunks, device="cpu")[:, None]
            for unit in self.units
            for piece in unit.pieces
        ]
        return rows.index_select(0, torch.cat([p.flatten() for p in place]).argsort().to(rows.device))

    def split_states(self, states: Tensor) -> tuple[Tensor, ...]:
        """`[N, ...]` unit by unit, in the units' order of sequences."""
        return states.index_select(0, self._order).split([len(unit.sequences) for unit in self.units])

    def join_states(self, states: list[Tensor]) -> Tensor:
        """The inverse of `split_states`."""
        return torch.cat(states).index_select(0, self._order.argsort())


def _pieces(
    starts: list[int], lengths: list[int], C: int, tokens_per_piece: int, device: torch.device
) -> Iterator[Piece]:
    """The pieces of one unit; a piece ends where it is large enough or where a sequence does."""
    counts = [-(-length // C) for length in lengths]
    start, length = (torch.tensor(x, dtype=torch.long, device=device)[:, None] for x in (starts, lengths))
    first = 0
    while first < counts[-1]:
        done = bisect_right(counts, first)
        active = len(counts) - done
        chunks = min(counts[done] - first, max(1, tokens_per_piece // (active * C)))
        within = (first * C + torch.arange(chunks * C, device=device)).view(chunks, 1, C)
        valid = None if lengths[done] >= (first + chunks) * C else within < length[done:]
        # Rows past the end repeat the last token: whatever lies behind the sequence in memory is never read.
        tokens = start[done:] + within.minimum(length[done:] - 1)
        yield Piece(chunks, active, C, first, tokens.flatten(), valid)
        first += chunks


def sequences(call: KdaCall) -> tuple[list[int], list[int]]:
    """Start and length of each sequence in the flat batch `[B * T]`.

    Raises ValueError where `cu_seqlens` is negative, falls or exceeds T; reads it from the device.
    """
    if call.cu_seqlens is None:
        return [b * call.T for b in range(call.B)], [call.T] * call.B
    bounds = call.cu_seqlens.tolist()
    if bounds[0] < 0:
        raise ValueError(f"cu_seqlens: expected no negative value, got {bounds[0]} first")
    for n, (begin, end) in enumerate(pairwise(bounds)):
        if end < begin:
            raise ValueError(f"cu_seqlens: expected no decrease, got {begin} and then {end} at index {n + 1}")
    if bounds[-1] > call.T:
        raise ValueError(f"cu_seqlens: expected at most T = {call.T} last, got {bounds[-1]}")
    return bounds[:-1], [end - begin for begin, end in pairwise(bounds)]
