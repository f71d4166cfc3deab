"""M4, the state carried from chunk to chunk, in order:

v_new = u - w S        o = qg S + Aqk v_new        S <- diag(decay) S + kgᵀ v_new
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Carried(NamedTuple):
    """One tensor per chunk; n is the number of (sequence, head) pairs."""

    o: list[Tensor]  # [n, C, V]
    h: list[Tensor]  # [n, K, V] the state that enters the chunk
    v_new: list[Tensor]  # [n, C, V]
    final_state: Tensor  # [n, K, V]


def carry(Aqk: Tensor, qg: Tensor, kg: Tensor, decay: Tensor, w: Tensor, u: Tensor, initial_state: Tensor) -> Carried:
    """Aqk `[chunks, n, C, C]`, qg, kg, w `[.., C, K]`, decay `[.., K]`, u `[.., C, V]`, initial_state `[n, K, V]`."""
    o: list[Tensor] = []
    h: list[Tensor] = []
    v_new: list[Tensor] = []
    S = initial_state
    by_chunk = (x.unbind() for x in (torch.cat([w, qg], -2), u, Aqk, kg.mT, decay.unsqueeze(-1)))
    for wq_c, u_c, Aqk_c, kg_c, decay_c in zip(*by_chunk, strict=True):
        wS, qS = torch.bmm(wq_c, S).chunk(2, 1)
        h.append(S)
        v_new.append(u_c - wS)
        o.append(torch.baddbmm(qS, Aqk_c, v_new[-1]))
        # A matrix product of rows and columns of one element has other bits for one pair than for several.
        written = torch.baddbmm if kg_c.shape[2] > 1 else torch.addcmul
        S = written(S * decay_c, kg_c, v_new[-1])
    return Carried(o, h, v_new, S)
