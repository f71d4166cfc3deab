"""M2, the inverse: Ainv = (I + Akk)⁻¹ of strictly lower triangular Akk `[CHUNK, CHUNK]`, in fp32, transposed.

The diagonal blocks of LEAF rows are solved by forward substitution, all at once: row i of an inverse is that of I less
Σ_j Akk[i,j] times row j. It is found as a column of the transposed inverse, by products along rows and their sums,
because a vector unit spreads a row of Akk over others where a column of it would have to be fetched anew. Then
neighbours X, Y and the block B below X join by their Schur complement, [[X, 0], [-Y B X, Y]], until one is left:
transposed, the corner is -(Xᵀ Bᵀ) Yᵀ.
"""

import pypto

from .constants import CHUNK, LEAF, UNIT
from .tiles import begin_task, block, end_task, use_cube, use_tiles

LEAVES = CHUNK // LEAF


def inverse(Akk: pypto.Tensor, masks: pypto.Tensor) -> pypto.Tensor:
    """Ainvᵀ `[CHUNK, CHUNK]`, unit upper; `masks` as in `constants`."""
    use_tiles()
    negative = Akk * -1.0
    diagonal = pypto.Tensor([CHUNK, LEAF], pypto.DT_FP32)
    for at in range(0, CHUNK, LEAF):
        pypto.assemble(pypto.view(Akk, [LEAF, LEAF], [at, at]), [at, 0], diagonal)
    begin_task(1)
    blocks = _leaf_inverses(diagonal, pypto.view(block(masks, UNIT), [CHUNK, LEAF], [0, 0]))
    pairs = _pairs(blocks)
    end_task()
    while len(blocks) > 1:
        size, _ = blocks[0].shape
        use_cube(size, size, size)
        for n, pair in enumerate(pairs):
            X, Y = blocks[2 * n : 2 * n + 2]
            below = pypto.view(negative, [size, size], [(2 * n + 1) * size, 2 * n * size])
            corner = pypto.matmul(pypto.matmul(X, below, pypto.DT_FP32, b_trans=True), Y, pypto.DT_FP32)
            pypto.assemble(corner, [0, size], pair)
            pypto.assemble(pypto.full([size, size], 0.0, pypto.DT_FP32), [size, 0], pair)
        blocks, pairs = pairs, _pairs(pairs)
    use_tiles()
    return blocks[0]


def _pairs(blocks: list[pypto.Tensor]) -> list[pypto.Tensor]:
    """Neighbours on the diagonal of matrices of twice their size, of which the rest is still to be set."""
    size, _ = blocks[0].shape
    pairs = []
    for X, Y in zip(blocks[::2], blocks[1::2], strict=False):
        pair = pypto.Tensor([2 * size, 2 * size], pypto.DT_FP32)
        pypto.assemble(X, [0, 0], pair)
        pypto.assemble(Y, [size, size], pair)
        pairs.append(pair)
    return pairs


def _leaf_inverses(diagonal: pypto.Tensor, unit: pypto.Tensor) -> list[pypto.Tensor]:
    """The inverses of I plus each of the blocks in `diagonal`, transposed; `unit` has an identity for each of them.

    Both `[CHUNK, LEAF]`.
    """
    pypto.set_vec_tile_shapes(CHUNK, LEAF)
    leaves = [LEAVES, LEAF, LEAF]
    A = pypto.reshape(diagonal * -1.0, leaves)
    unit = pypto.where(unit, 1.0, 0.0)
    X = unit
    for i in range(1, LEAF):
        pypto.set_vec_tile_shapes(*leaves)
        row = pypto.reshape(pypto.expand_clone(pypto.view(A, [LEAVES, 1, LEAF], [0, i, 0]), leaves), [CHUNK, LEAF])
        pypto.set_vec_tile_shapes(CHUNK, LEAF)
        column = pypto.sum(X * row, -1, keepdim=True)
        X = X + pypto.expand_clone(column, [CHUNK, LEAF]) * pypto.view(unit, [1, LEAF], [i, 0])
    return [pypto.view(X, [LEAF, LEAF], [at, 0]) for at in range(0, CHUNK, LEAF)]
