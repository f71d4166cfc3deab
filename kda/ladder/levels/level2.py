"""Level 2, a decay for every head: S <- exp(g) S + k vᵀ, o = qᵀ S, g <= 0 (arXiv:2307.08621).

What is new: whatever token j wrote has shrunk by exp(g (i - j)) when token i reads it. In the chunked form that factor
falls apart at the borders of the chunks. Rows i, j count from 0 within a chunk of BC rows:

    qg_i = exp(g (i + 1)) q_i     from the state that enters the chunk to row i
    kg_j = exp(g (BC - 1 - j)) k_j     from row j to the end of the chunk, where the state is exp(g BC) of what it was
    Aqk_ij = exp(g (i - j)) q_i k_j     within the chunk
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda.golden.constants import MIN_LOG_DECAY

from .chunks import entering_states, join, split


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Form A: level 1 with a decay before each write. g `[H]`, log decay."""
    q, k, v = q.double(), k.double(), v.double()
    decay = g.double().exp()[:, None, None]
    o = torch.empty_like(v)
    S = k.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    for t in range(v.shape[1]):
        S = decay * S + k[:, t, :, :, None] * v[:, t, :, None, :]
        o[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], S)
    return o


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, BC: int) -> Tensor:
    """Form B: level 1 with weights between 0 and 1 on what was 0 or 1. g `[H]`, log decay."""
    qc, kc, vc = split(q, BC), split(k, BC), split(v, BC)
    g = g.double().clamp(min=MIN_LOG_DECAY)[:, None, None, None]  # -inf times a distance of 0 would be NaN
    i = torch.arange(BC, device=q.device)
    qg = (g * (i + 1)[:, None]).exp() * qc
    kg = (g * (BC - 1 - i)[:, None]).exp() * kc
    weights = (g * (i[:, None] - i).clamp(min=0)).exp()
    states = entering_states((g * BC).exp(), kg, vc)
    return join(qg @ states + (qc @ kc.mT * weights).tril() @ vc, q.shape[1])
