"""M2, the decayed products inside a chunk.

    Akk[i,j] = beta_i Σ_d k_i k_j exp(G_i - G_j), j < i        Aqk[i,j] = Σ_d q_i k_j exp(G_i - G_j), j <= i

Every exponent is a difference G_i - G_j with j <= i, hence never positive.
"""

from __future__ import annotations

from typing import NamedTuple

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
    q, k, G = (x.reshape(-1, C, K) for x in (q, k, G))
    Akk, Aqk = k.new_zeros(2, len(k), C, C)
    step = max(1, SLICE_ELEMENTS // (C * K))
    for s in (slice(at, at + step) for at in range(0, len(k), step)):
        q_s, k_s, G_s = q[s], k[s], G[s]
        for i in range(C):
            decayed = exp(G_s[:, i, None] - G_s[:, : i + 1], k.dtype).mul_(k_s[:, : i + 1])
            Akk[s, i, :i] = vecdot(decayed[:, :i], k_s[:, i, None])
            Aqk[s, i, : i + 1] = vecdot(decayed, q_s[:, i, None])
    Akk, Aqk = Akk.reshape(*lead, C, C), Aqk.reshape(*lead, C, C)
    return Scores(Akk * beta.unsqueeze(-1), Aqk)
