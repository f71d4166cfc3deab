"""M4, the state carried from chunk to chunk, in order:

v_new = u - w S        o = qg S + Aqk v_new        S <- diag(decay) S + kgᵀ v_new
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Carried(NamedTuple):
    o: Tensor  # [chunks, ..., C, V]
    h: Tensor  # [chunks, ..., K, V] the state that enters each chunk
    v_new: Tensor  # [chunks, ..., C, V]
    final_state: Tensor  # [..., K, V]


def carry(Aqk: Tensor, qg: Tensor, kg: Tensor, decay: Tensor, w: Tensor, u: Tensor, initial_state: Tensor) -> Carried:
    """From the tensors of M2 and M3, whose first axis counts the chunks, and the state `[..., K, V]` before them."""
    S, o, v_new = initial_state, torch.empty_like(u), torch.empty_like(u)
    h = S.new_empty(len(u), *S.shape)
    for c in range(len(u)):
        h[c] = S
        v_new[c] = u[c] - w[c] @ S
        o[c] = qg[c] @ S + Aqk[c] @ v_new[c]
        S = decay[c].unsqueeze(-1) * S + kg[c].mT @ v_new[c]
    return Carried(o, h, v_new, S)
