"""M4, the state carried from chunk to chunk.

    v_new = u - w S        o = qg S + Aqk v_new        S <- diag(decay) S + kgᵀ v_new
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Carried(NamedTuple):
    """One tensor per chunk; n is the number of (sequence, head) pairs."""

    o: list[Tensor]  # [n, C, V]
    v_new: list[Tensor]  # [n, C, V]
    h: list[Tensor]  # [n, K, V] the state that enters the chunk
    S: Tensor  # [n, K, V] the state after the last one


def carry(S: Tensor, Aqk: Tensor, qg: Tensor, kg: Tensor, decay: Tensor, w: Tensor, u: Tensor) -> Carried:
    """From S before the chunks; Aqk `[chunks, n, C, C]`, qg, kg and w `[.., C, K]`, decay `[.., K]`, u `[.., C, V]`."""
    C = u.shape[-2]
    wq = torch.cat([w, qg], -2)
    o, v_new, h = [], [], []
    for c in range(len(u)):
        wS, qS = torch.bmm(wq[c], S).split(C, 1)
        h.append(S)
        v_new.append(u[c] - wS)
        o.append(torch.baddbmm(qS, Aqk[c], v_new[c]))
        S = torch.baddbmm(S * decay[c].unsqueeze(-1), kg[c].mT, v_new[c])
    return Carried(o, v_new, h, S)
