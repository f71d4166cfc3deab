"""Level 3, a decay for every token and channel: S <- diag(exp g_t) S + k vᵀ, o = qᵀ S, g <= 0 (arXiv:2312.06635).

What is new: distances become sums. With G_i = g_0 + … + g_i within the chunk, per channel,

    qg_i = exp(G_i) q_i        kg_j = exp(G_last - G_j) k_j        decay = exp(G_last)
    Aqk_ij = Σ_d q_id k_jd exp(G_id - G_jd)

and the decay no longer leaves the sum over the channels d. exp(G_i) exp(-G_j) would be a matrix product again, but its
second factor overflows: every exponent has to be a difference that is not positive.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda.golden.constants import MIN_LOG_DECAY

from .chunks import entering_states, join, split


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Form A: level 2 with the decay of the token and channel at hand. g `[B, N, H, K]`, log decay."""
    q, k, v = q.double(), k.double(), v.double()
    decay = g.double().exp()[..., None]
    o = torch.empty_like(v)
    S = k.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    for t in range(v.shape[1]):
        S = decay[:, t] * S + k[:, t, :, :, None] * v[:, t, :, None, :]
        o[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], S)
    return o


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, BC: int) -> Tensor:
    """Form B: level 2 with differences of G for the distances times g. g `[B, N, H, K]`, log decay."""
    qc, kc, vc = split(q, BC), split(k, BC), split(v, BC)
    G = split(g, BC).clamp(min=MIN_LOG_DECAY).cumsum(3)
    last = G[..., -1:, :]
    states = entering_states(last.mT.exp(), (last - G).exp() * kc, vc)
    Aqk = torch.zeros_like(qc @ kc.mT)
    for i in range(BC):
        row = slice(i, i + 1)
        decayed = (G[..., row, :] - G[..., : i + 1, :]).exp() * kc[..., : i + 1, :]
        Aqk[..., row, : i + 1] = qc[..., row, :] @ decayed.mT
    return join((G.exp() * qc) @ states + Aqk @ vc, q.shape[1])
