"""The constant matrices that the chunk kernel multiplies and masks with: they depend on the chunk length alone.

A chunk of CHUNK rows is cut in two at a border, the halves are cut in turn, down to single rows: one level for each
length of half in HALVES. At level `half` row i has the border of its own pair of halves; the pairs (i, j) with i right
of it and j left of it fill one block a pair, and over all levels these blocks are the strict lower triangle.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

CHUNK = 128
"""Tokens per chunk: the side of a full tile of the cube unit."""

HALVES = tuple(1 << level for level in range(CHUNK.bit_length() - 1))
"""Half lengths of the levels: 1, 2, ... CHUNK / 2."""

FROM_START, TO_END = len(HALVES), len(HALVES) + 1
"""Blocks of `decay_sums` behind those of the levels."""

LOWER, STRICTLY_LOWER, IDENTITY, UNIT = range(len(HALVES), len(HALVES) + 4)
"""Blocks of `masks` behind those of the levels."""

LEAF = 32
"""Rows of the diagonal blocks with which the inverse begins."""


@functools.cache
@torch.inference_mode(False)  # what is remembered must serve outside of it as well
def decay_sums(device: torch.device) -> Tensor:
    """0 and 1, fp32 `[(levels + 2) * CHUNK, CHUNK]`: times g, the log decay between each row and its border.

    One block of CHUNK rows a level: a row right of its border sums from there up to and including itself, a row left
    of it sums what lies after itself up to the border. Then the same towards the chunk's start and its end.
    """
    row = torch.arange(CHUNK, device=device)
    middles = [row // (2 * half) * (2 * half) + half for half in HALVES]
    border = torch.stack([*middles, torch.zeros_like(row), torch.full_like(row, CHUNK)])[..., None]
    i, j = row[:, None], row
    summed = torch.where(i >= border, (border <= j) & (j <= i), (i < j) & (j < border))
    return summed.to(torch.float32).flatten(0, 1)


@functools.cache
@torch.inference_mode(False)  # what is remembered must serve outside of it as well
def masks(device: torch.device) -> Tensor:
    """Bool `[(levels + 4) * CHUNK, CHUNK]`.

    One block of CHUNK rows a level: true where row i lies right and column j left of one border. Then the lower
    triangle, with and without the diagonal, the identity, and identities of LEAF columns below one another.
    """
    i = torch.arange(CHUNK, device=device)[:, None]
    j = i.mT
    levels = [(i // (2 * h) == j // (2 * h)) & (i % (2 * h) >= h) & (j % (2 * h) < h) for h in HALVES]
    return torch.stack([*levels, j <= i, j < i, i == j, i % LEAF == j]).flatten(0, 1)
