"""Level 1 with its two classic faults. The check of the references is worth something only if it sees these.

Both count a chunk's own tokens twice, once through the state and once within the chunk: the result is too large by tens
of per cent, without a NaN that would give it away.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from .levels.chunks import join, split


def chunked_without_shift(q: Tensor, k: Tensor, v: Tensor, BC: int) -> Tensor:
    """Form B, but a chunk reads the running sum that holds the chunk itself."""
    qc, kc, vc = split(q, BC), split(k, BC), split(v, BC)
    states = (kc.mT @ vc).cumsum(2)  # the fault: not shifted by one chunk
    return join(qc @ states + (qc @ kc.mT).tril() @ vc, q.shape[1])


def seq_in_loop_update_first(q: Tensor, k: Tensor, v: Tensor, BC: int, block_V: int) -> Tensor:
    """Form D, but the state takes the chunk in before the chunk is read out."""
    qc, kc, vc = split(q, BC), split(k, BC), split(v, BC)
    o = torch.empty_like(vc)
    for b, h, column in product(range(v.shape[0]), range(v.shape[2]), range(0, v.shape[3], block_V)):
        columns = slice(column, column + block_V)
        S = vc.new_zeros(k.shape[3], vc[..., columns].shape[-1])
        for c in range(qc.shape[2]):
            Q, K, V = qc[b, h, c], kc[b, h, c], vc[b, h, c, :, columns]
            S = S + K.mT @ V  # the fault: one line too early
            o[b, h, c, :, columns] = Q @ S + (Q @ K.mT).tril() @ V
    return join(o, q.shape[1])
