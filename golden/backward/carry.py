"""dM4, the gradient of the state carried from chunk to chunk, the last chunk first:

dv_new = Aqkᵀ do + kg dh        db = Ainvᵀ dv_new        dh <- diag(decay) dh + qgᵀ do - wᵀ dv_new

dh is the gradient of the state that leaves the chunk. What the last line makes of it is the gradient of the state that
enters the chunk, hence that of the state that leaves the chunk before. v_new solves (I + Akk) v_new = b, where
b = beta v - kb h and kb = beta k exp G; db is the gradient of b.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class CarryGradients(NamedTuple):
    dv_new: Tensor  # [chunks, ..., C, V]
    db: Tensor  # [chunks, ..., C, V]
    dh: Tensor  # [chunks, ..., K, V] of the state that leaves each chunk
    d_initial_state: Tensor  # [..., K, V] of the state that enters the first chunk


def carry_backward(
    Aqk: Tensor, Ainv: Tensor, qg: Tensor, kg: Tensor, decay: Tensor, w: Tensor, do: Tensor, d_final_state: Tensor
) -> CarryGradients:
    """From the tensors of M2 and M3, do `[chunks, ..., C, V]`, and the gradient `[..., K, V]` of the last state."""
    dS, dv_new = d_final_state, torch.empty_like(do)
    dh = dS.new_empty(len(do), *dS.shape)
    for c in reversed(range(len(do))):
        dh[c] = dS
        dv_new[c] = Aqk[c].mT @ do[c] + kg[c] @ dS
        dS = decay[c].unsqueeze(-1) * dS + qg[c].mT @ do[c] - w[c].mT @ dv_new[c]
    return CarryGradients(dv_new, Ainv.mT @ dv_new, dh, dS)
