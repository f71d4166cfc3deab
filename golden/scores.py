"""M2, the decayed products inside a chunk.

    Akk[i,j] = beta_i Σ_d k_i k_j exp(G_i - G_j), j < i        Aqk[i,j] = Σ_d q_i k_j exp(G_i - G_j), j <= i

Every exponent is a difference G_i - G_j with j <= i, hence never positive.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vecdot

from .exponential import exp

SLICE_ELEMENTS = 1 << 17
"""The decays of one row against all earlier rows of its chunk are formed for as many chunks at a time as give at most
this many: few enough to stay in the cache."""


class Scores(NamedTuple):
    Akk: Tensor  # [..., C, C] strictly lower
    Aqk: Tensor  # [..., C, C] lower


def scores(q: Tensor, k: Tensor, beta: Tensor, G: Tensor) -> Scores:
    """From M1's tensors; the decay is taken directly as exp(G_i - G_j), row by row of the chunk."""
    *lead, C, K = k.shape
    q, k = q.reshape(-1, C, K), k.reshape(-1, C, K)
    Akk, Aqk = k.new_zeros(2, len(k), C, C)
    for s, i, decay in decays(G, k.dtype):
        decayed = decay.mul_(k[s, : i + 1])
        Akk[s, i, :i] = vecdot(decayed[:, :i], k[s, i, None])
        Aqk[s, i, : i + 1] = vecdot(decayed, q[s, i, None])
    Akk, Aqk = Akk.reshape(*lead, C, C), Aqk.reshape(*lead, C, C)
    return Scores(Akk * beta.unsqueeze(-1), Aqk)


def decays(G: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, int, Tensor]]:
    """exp(G_i - G_j), j <= i, of every row i, the last one first, for a slice of the chunks at a time.

    Yields the slice of the chunks `[..., C, K] -> [chunks, C, K]`, i, and the decays `[chunks of the slice, i + 1, K]`.
    """
    C, K = G.shape[-2:]
    G = G.reshape(-1, C, K)
    step = max(1, SLICE_ELEMENTS // (C * K))
    for s in (slice(at, at + step) for at in range(0, len(G), step)):
        for i in reversed(range(C)):
            yield s, i, exp(G[s, i, None] - G[s, : i + 1], dtype)
