"""Level 1, linear attention: S <- S + k vᵀ, o = qᵀ S. What is new is the state, and its form in chunks.

With S_c the sum over all chunks before c (arXiv:2006.16236; in chunks arXiv:2202.10447):

    S_c = Σ_{c' < c} K_c'ᵀ V_c'        O_c = Q_c S_c + tril(Q_c K_cᵀ) V_c

The first term needs no mask, since every token of an earlier chunk is visible to all of chunk c. The second is masked
with 0, not with -inf, since no exponential follows. Form B sums up all S_c at once; C sums each of them anew, as blocks
must that cannot wait for each other; D carries one S along the sequence.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from .chunks import join, split


def recurrent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Form A, the definition, token by token: q, k `[B, N, H, K]`, v `[B, N, H, V]` -> o `[B, N, H, V]`."""
    q, k, v = q.double(), k.double(), v.double()
    o = torch.empty_like(v)
    S = k.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    for t in range(v.shape[1]):
        S = S + k[:, t, :, :, None] * v[:, t, :, None, :]
        o[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], S)
    return o


def chunked(q: Tensor, k: Tensor, v: Tensor, BC: int) -> Tensor:
    """Form B, in chunks of BC tokens: a state for every chunk, then all chunks side by side."""
    qc, kc, vc = split(q, BC), split(k, BC), split(v, BC)
    o = qc @ prefix_states(kc, vc) + (qc @ kc.mT).tril() @ vc
    return join(o, q.shape[1])


def prefix_states(kc: Tensor, vc: Tensor) -> Tensor:
    """S_c of every chunk `[B, H, NC, K, V]`: of the running sums, the one that does not hold the chunk itself."""
    inclusive = (kc.mT @ vc).cumsum(2)
    return torch.cat([torch.zeros_like(inclusive[:, :, :1]), inclusive[:, :, :-1]], 2)


def per_block(q: Tensor, k: Tensor, v: Tensor, BC: int) -> Tensor:
    """Form C, the control flow of the kernel `linattn_chunk`: a block owns a chunk and sums up all that lies before."""
    qc, kc, vc = split(q, BC), split(k, BC), split(v, BC)
    o = torch.empty_like(vc)
    for b, h, block in product(*map(range, qc.shape[:3])):
        Q, K, V = qc[b, h], kc[b, h], vc[b, h]
        S = K.new_zeros(K.shape[-1], V.shape[-1])
        for c in range(block):
            S += K[c].mT @ V[c]
        o[b, h, block] = Q[block] @ S + (Q[block] @ K[block].mT).tril() @ V[block]
    return join(o, q.shape[1])


def seq_in_loop(q: Tensor, k: Tensor, v: Tensor, BC: int, block_V: int) -> Tensor:
    """Form D, the control flow of the kernel `linattn_seq_in_loop`: a block owns block_V columns of a head's state and
    walks the sequence. Columns of the state never meet, so block_V changes no bit."""
    qc, kc, vc = split(q, BC), split(k, BC), split(v, BC)
    o = torch.empty_like(vc)
    for b, h, column in product(range(v.shape[0]), range(v.shape[2]), range(0, v.shape[3], block_V)):
        columns = slice(column, column + block_V)
        S = vc.new_zeros(k.shape[3], vc[..., columns].shape[-1])
        for c in range(qc.shape[2]):
            Q, K, V = qc[b, h, c], kc[b, h, c], vc[b, h, c, :, columns]
            o[b, h, c, :, columns] = in_order(Q, S) + in_order((Q @ K.mT).tril(), V)
            S = S + in_order(K.mT, V)
    return join(o, q.shape[1])


def in_order(x: Tensor, y: Tensor) -> Tensor:
    """x @ y, summed from the first term to the last: a library's order may depend on how many columns y has."""
    return sum((x[:, i, None] * y[i] for i in range(len(y))), x.new_zeros(()))
