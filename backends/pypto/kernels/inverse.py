"""M2, the inverse: Ainv = (I + Akk)⁻¹ of strictly lower triangular Akk `[CHUNK, CHUNK]`, in fp32.

The diagonal blocks of SUB_BLOCK rows are solved by forward substitution, all at once and column by column: as soon as
row j of an inverse is final, Akk[i,j] times it is taken from every later row i. Then neighbours X, Y and the block B
below X join by their Schur complement, [[X, 0], [-Y B X, Y]], from SUB_BLOCK rows to CHUNK: on the whole matrix that
is X - X (B X) with the B of all pairs at once, Akk under the mask of their level.
"""

import pypto

from kda.golden.constants import SUB_BLOCK

from .constants import CHUNK, HALVES, IDENTITY, LEAF
from .tiles import block, use_tiles

LEAVES = CHUNK // SUB_BLOCK


def inverse(Akk: pypto.Tensor, masks: pypto.Tensor) -> pypto.Tensor:
    """`[CHUNK, CHUNK]`, unit lower; `masks` as in `constants`."""
    Ainv = _leaf_inverses(Akk, block(masks, IDENTITY)) * block(masks, LEAF)
    for level, half in enumerate(HALVES):
        if half >= SUB_BLOCK:
            below = pypto.matmul(Akk * block(masks, level), Ainv, pypto.DT_FP32)
            Ainv = Ainv - pypto.matmul(Ainv, below, pypto.DT_FP32)
    return Ainv


def _leaf_inverses(Akk: pypto.Tensor, identity: pypto.Tensor) -> pypto.Tensor:
    """The inverses of the diagonal blocks, each in its rows and repeated over all columns `[CHUNK, CHUNK]`."""
    A, X = _leaves(Akk), _leaves(identity)
    shape = [LEAVES, SUB_BLOCK, SUB_BLOCK]
    pypto.set_vec_tile_shapes(*shape)
    for j in range(SUB_BLOCK - 1):
        column = pypto.expand_clone(pypto.view(A, [LEAVES, SUB_BLOCK, 1], [0, 0, j]), shape)
        row = pypto.expand_clone(pypto.view(X, [LEAVES, 1, SUB_BLOCK], [0, j, 0]), shape)
        X = X - column * row
    use_tiles()
    return pypto.concat([pypto.reshape(X, [CHUNK, SUB_BLOCK])] * LEAVES, 1)


def _leaves(matrix: pypto.Tensor) -> pypto.Tensor:
    """The diagonal blocks `[LEAVES, SUB_BLOCK, SUB_BLOCK]`."""
    blocks = [pypto.view(matrix, [SUB_BLOCK, SUB_BLOCK], [at, at]) for at in range(0, CHUNK, SUB_BLOCK)]
    return pypto.reshape(pypto.concat(blocks, 0), [LEAVES, SUB_BLOCK, SUB_BLOCK])
