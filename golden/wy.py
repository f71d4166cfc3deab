"""M3, the WY form of a chunk: the corrections of all its tokens, and what meets the state, without the state.

w = Ainv (beta k exp G)        u = Ainv (beta v)
qg = q exp G                   kg = k exp(G_last - G)        decay = exp G_last
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .exponential import exp


class WY(NamedTuple):
    qg: Tensor  # [..., C, K]
    kg: Tensor  # [..., C, K]
    decay: Tensor  # [..., K]
    w: Tensor  # [..., C, K]
    u: Tensor  # [..., C, V]


def wy(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, G: Tensor, Ainv: Tensor) -> WY:
    """From M1's tensors, v `[..., C, V]` and M2's inverse."""
    exp_G = exp(G, k.dtype)
    beta = beta.unsqueeze(-1)
    return WY(
        qg=q * exp_G,
        kg=k * exp(G[..., -1:, :] - G, k.dtype),
        decay=exp_G[..., -1, :].clone(),
        w=Ainv @ (beta * k * exp_G),
        u=Ainv @ (beta * v),
    )
