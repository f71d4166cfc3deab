"""M2, the inverse: Ainv = (I + Akk)⁻¹, by joining inverted diagonal blocks."""

from __future__ import annotations

from torch import Tensor

from .scores import join_blocks


def inverse(Akk: Tensor) -> Tensor:
    """Unit lower triangular, of strictly lower triangular Akk `[n, C, C]`, C a power of two.

    Two inverted diagonal blocks X, Y and the block B below X and beside Y join to [[X, 0], [-Y B X, Y]], from single
    rows up to the whole. Unlike a power series this multiplies inverses alone: for nearly equal keys they stay small
    while the powers of Akk do not.
    """
    n, C, _ = Akk.shape
    inverted = Akk.new_ones(n, C, 1, 1)
    half = 1
    while half < C:
        blocks = Akk.unflatten(2, (-1, 2 * half)).unflatten(1, (-1, 2 * half)).diagonal(dim1=1, dim2=3).movedim(-1, 1)
        X, Y = inverted.unflatten(1, (-1, 2)).unbind(2)
        inverted = join_blocks(inverted, -Y @ (blocks[..., half:, :half] @ X))
        half *= 2
    return inverted.squeeze(1)
