"""M3, the WY form of a chunk: the delta rule's corrections of all its tokens, solved at once.

    Ainv = (I + Akk)⁻¹        w = Ainv (beta k exp G)        u = Ainv (beta v)
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .intra import join_blocks


class WY(NamedTuple):
    """Of each chunk."""

    Ainv: Tensor  # [n, C, C] unit lower
    w: Tensor  # [n, C, K]
    u: Tensor  # [n, C, V]


def wy(Akk: Tensor, beta: Tensor, k_decayed: Tensor, v: Tensor) -> WY:
    """Akk `[n, C, C]` strictly lower, with beta; beta `[n, C, 1]`; k exp G `[n, C, K]`; v `[n, C, V]`."""
    Ainv = unit_lower_inverse(Akk)
    with_beta = Ainv * beta.mT
    return WY(Ainv, with_beta @ k_decayed, with_beta @ v)


def unit_lower_inverse(A: Tensor) -> Tensor:
    """(I + A)⁻¹ of strictly lower triangular A `[n, C, C]`, C a power of two.

    Two inverted diagonal blocks X, Y and the block B below X and beside Y join to [[X, 0], [-Y B X, Y]], from single
    rows up to the whole. Unlike a power series this multiplies inverses alone: for nearly equal keys they stay small
    while the powers of A do not.
    """
    n, C, _ = A.shape
    inverse = A.new_ones(n, C, 1, 1)
    half = 1
    while half < C:
        blocks = A.unflatten(2, (-1, 2 * half)).unflatten(1, (-1, 2 * half)).diagonal(dim1=1, dim2=3).movedim(-1, 1)
        X, Y = inverse.unflatten(1, (-1, 2)).unbind(2)
        inverse = join_blocks(inverse, -Y @ (blocks[..., half:, :half] @ X))
        half *= 2
    return inverse.squeeze(1)
