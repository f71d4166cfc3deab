"""M2, the decayed products inside a chunk, by halving: no exponent is ever positive, at any gate.

    Akk[i,j] = Σ_d k_i k_j exp(G_i - G_j), j < i          Aqk[i,j] = Σ_d q_i k_j exp(G_i - G_j), j <= i

A chunk is cut in two at a border b. For a row i right of it and a row j left of it,

    exp(G_i - G_j) = exp(g_b + ... + g_i) * exp(g_{j+1} + ... + g_{b-1})

so the block right of and below the border is one matmul of factors that are at most 1. The halves are cut in turn,
down to single rows. Both sums start at the border and take terms of one sign, so a small sum keeps its full precision
beside a gate of -1000, and where a factor underflows to 0 so does the product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    """Of each chunk; the last axes are `[C, C]` or `[C, K]`."""

    Akk: Tensor  # strictly lower, without beta
    Aqk: Tensor  # lower
    from_start: Tensor  # exp(G)
    to_end: Tensor  # exp(G_last - G)


def scores(q: Tensor, k: Tensor, g: Tensor) -> Scores:
    """q (scaled), k and g `[n, C, K]`, C a power of two; g finite and <= 0."""
    n, C, _ = k.shape
    halves = [1 << level for level in range(C.bit_length() - 1)]
    *to_middles, from_start, to_end = _decay_to(_borders(halves, C, g.device), g).unbind(1)
    Akk, Aqk = k.new_zeros(n, C, 1, 1), (q * k).sum(-1)[..., None, None]
    for half, decay in zip(halves, to_middles, strict=True):
        (decay_left, decay_right), (k_left, k_right), (_, q_right) = (
            x.unflatten(1, (-1, 2, half)).unbind(2) for x in (decay, k, q)
        )
        left = (k_left * decay_left).mT
        Akk = join_blocks(Akk, (k_right * decay_right) @ left)
        Aqk = join_blocks(Aqk, (q_right * decay_right) @ left)
    return Scores(Akk.squeeze(1), Aqk.squeeze(1), from_start, to_end)


def join_blocks(diagonal: Tensor, below: Tensor) -> Tensor:
    """[[a, 0], [c, b]] of each pair a, b of diagonal blocks `[n, 2m, s, s]` and its c of `below` `[n, m, s, s]`."""
    upper, lower = diagonal.unflatten(1, (-1, 2)).unbind(2)
    return torch.cat([torch.cat([upper, torch.zeros_like(below)], -1), torch.cat([below, lower], -1)], -2)


def _borders(halves: list[int], C: int, device: torch.device) -> Tensor:
    """For each way of cutting the chunk, each row's border `[len(halves) + 2, C]`; then the chunk's start and end."""
    row = torch.arange(C, device=device)
    middles = [row // (2 * half) * (2 * half) + half for half in halves]
    return torch.stack([*middles, torch.zeros_like(row), torch.full_like(row, C)])


def _decay_to(borders: Tensor, g: Tensor) -> Tensor:
    """The decay between each row of g `[n, C, K]` and each of its borders `[levels, C]`: `[n, levels, C, K]`.

    A row at or right of its border decays from there up to and including itself, one left of it from after itself on.
    """
    n, C, _ = g.shape
    b, j = borders[..., None], torch.arange(C, device=g.device)
    i = j[:, None]
    between = torch.where(i >= b, (b <= j) & (j <= i), (i < j) & (j < b)).to(g.dtype)
    return (between.flatten(0, 1).expand(n, -1, -1) @ g).exp().unflatten(1, borders.shape)
