"""dM3, the gradients of what a chunk is carried on with, all chunks at once:

dAqk = tril(do v_newᵀ)     dAkk = -stril(db v_newᵀ)
dqg = do hᵀ                dkb = -db hᵀ                 dkg = v_new dhᵀ        ddecay = Σ_V h dh

tril keeps j <= i and stril j < i. h is the state that enters the chunk, and dh the gradient of the one that leaves it.
kb = beta k exp G, by which the tokens' keys read h: (I + Akk) v_new = beta v - kb h. Since v_new solves that system, db
alone gives dAkk, and no gradient of the inverse, of w or of u is needed.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class WYGradients(NamedTuple):
    dAqk: Tensor  # [..., C, C] lower
    dAkk: Tensor  # [..., C, C] strictly lower
    dqg: Tensor  # [..., C, K]
    dkb: Tensor  # [..., C, K]
    dkg: Tensor  # [..., C, K]
    ddecay: Tensor  # [..., K]


def wy_backward(h: Tensor, v_new: Tensor, do: Tensor, db: Tensor, dh: Tensor) -> WYGradients:
    """From M4's tensors, do `[..., C, V]` and dM4's."""
    return WYGradients(
        dAqk=(do @ v_new.mT).tril(),
        dAkk=-(db @ v_new.mT).tril(-1),
        dqg=do @ h.mT,
        dkb=-db @ h.mT,
        dkg=v_new @ dh.mT,
        ddecay=(h * dh).sum(-1),
    )
