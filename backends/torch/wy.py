"""M3, the WY form of a chunk: the corrections of all its tokens, and what meets the state, without the state.

w = Ainv (beta k exp G)        u = Ainv (beta v)
qg = q exp G                   kg = k exp(G_last - G)        decay = exp G_last
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class WY(NamedTuple):
    """Of each chunk."""

    qg: Tensor  # [n, C, K]
    kg: Tensor  # [n, C, K]
    decay: Tensor  # [n, K]
    w: Tensor  # [n, C, K]
    u: Tensor  # [n, C, V]


def wy(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, from_start: Tensor, to_end: Tensor, Ainv: Tensor) -> WY:
    """q (scaled) and k `[n, C, K]`, v `[n, C, V]`, beta `[n, C, 1]`, exp G and exp(G_last - G) `[n, C, K]`."""
    with_beta = Ainv * beta.mT
    return WY(q * from_start, k * to_end, from_start[:, -1], with_beta @ (k * from_start), with_beta @ v)
