"""M2 without the inverse where gates have a lower bound: the decayed products inside a chunk, block by block.

    Akk[i,j] = beta_i Σ_d k_i k_j exp(G_i - G_j), j < i          Aqk[i,j] = Σ_d q_i k_j exp(G_i - G_j), j <= i

A block of SUB_BLOCK rows has its pivot p in the middle. For a row i of it and a row j of it or of any block before,

    exp(G_i - G_j) = exp(G_i - G_p) * exp(G_p - G_j)

The first factor has at most SUB_BLOCK / 2 gates in its exponent, of either sign: within 40 nats, since none is below
-5. The second one is the same from row j to the pivot of j's own block, and on from pivot to pivot by steps that are
at most 1. So each row of blocks is one product: its queries and keys, times all keys up to its end. L is the cumsum of
g inside each block. `decayed` works along columns, so that all its tensors stay in a vector unit's buffer.
"""

import pypto

from kda.golden.constants import SUB_BLOCK

from .constants import CHUNK, LOWER, STRICTLY_LOWER
from .tiles import BLOCKS, Tiles, block, flat, use_blocks, use_columns, use_cube, use_tiles

PIVOT = SUB_BLOCK // 2 - 1


def decayed(q: pypto.Tensor, k: pypto.Tensor, g: pypto.Tensor, beta: pypto.Tensor
            ) -> tuple[Tiles, pypto.Tensor, list[pypto.Tensor]]:  # fmt: skip
    """q (scaled), k, g `[CHUNK, K]` and beta `[CHUNK, 1]` -> qg, kg, decay, kb = beta k exp G; then what is multiplied.

    That is k and q of each block at its pivot, `[2 * CHUNK, K]`, k before q; and for each block all keys up to its end
    `[rows, K]`.
    """
    K = k.shape[1]
    in_blocks = [BLOCKS, SUB_BLOCK, K]
    use_blocks()
    q, k, g = (pypto.reshape(x, in_blocks) for x in (q, k, g))
    L = pypto.cumsum(g, 1)
    pivot, whole = (pypto.view(L, [BLOCKS, 1, K], [0, at, 0]) for at in (PIVOT, SUB_BLOCK - 1))
    from_pivot = L - pypto.expand_clone(pivot, in_blocks)
    k_flat, to_pivot = flat(k), flat(pypto.exp(from_pivot * -1.0))
    from_pivot = pypto.exp(from_pivot)
    q, k = q * from_pivot, k * from_pivot
    left = flat(pypto.concat([k, q], 1))

    rest = [pypto.view(whole - pivot, [1, 1, K], [b, 0, 0]) for b in range(BLOCKS)]
    before = [pypto.view(pivot, [1, 1, K], [b, 0, 0]) for b in range(BLOCKS)]
    steps = [pypto.exp(after + to_next) for after, to_next in zip(rest, before[1:], strict=False)]
    to_end = pypto.exp(rest[-1])
    from_start = [pypto.exp(before[0])]
    for step in steps:
        from_start.append(from_start[-1] * step)
    to_pivots = pypto.expand_clone(pypto.concat(from_start, 0), in_blocks)
    qg, kb = flat(q * to_pivots), flat(k * to_pivots)
    decay = pypto.reshape(from_start[-1] * to_end, [1, K])

    steps = [pypto.reshape(x, [1, K]) for x in (*steps, to_end)]
    use_columns()
    keys = [_of_block(0, k_flat, to_pivot)]
    for b in range(1, BLOCKS):
        keys.append(pypto.concat([keys[-1] * steps[b - 1], _of_block(b, k_flat, to_pivot)], 0))
    return {"qg": qg, "kg": keys[-1] * steps[-1], "kb": kb * beta, "decay": decay}, left, keys


def _of_block(b: int, keys: pypto.Tensor, decay: pypto.Tensor) -> pypto.Tensor:
    shape, at = [SUB_BLOCK, keys.shape[1]], [b * SUB_BLOCK, 0]
    return pypto.view(keys, shape, at) * pypto.view(decay, shape, at)


def scores(left: pypto.Tensor, keys: list[pypto.Tensor], beta: pypto.Tensor, masks: pypto.Tensor
           ) -> tuple[pypto.Tensor, pypto.Tensor]:  # fmt: skip
    """Akk, strictly lower, and Aqk, lower, `[CHUNK, CHUNK]`; beta `[CHUNK, 1]`."""
    rows, K = 2 * SUB_BLOCK, left.shape[1]
    table = pypto.Tensor([2 * CHUNK, CHUNK], pypto.DT_FP32)  # what is right of the blocks is never set, nor used
    for b, upto in enumerate(keys):
        use_cube(rows, K, upto.shape[0])
        product = pypto.matmul(pypto.view(left, [rows, K], [b * rows, 0]), upto, pypto.DT_FP32, b_trans=True)
        pypto.assemble(product, [b * rows, 0], table)
    pypto.set_vec_tile_shapes(BLOCKS // 2, SUB_BLOCK, CHUNK)
    table = pypto.reshape(table, [BLOCKS, rows, CHUNK])
    of_keys, of_queries = (flat(pypto.view(table, [BLOCKS, SUB_BLOCK, CHUNK], [0, at, 0])) for at in (0, SUB_BLOCK))
    use_tiles()
    Akk = pypto.where(block(masks, STRICTLY_LOWER), of_keys, 0.0) * beta
    return Akk, pypto.where(block(masks, LOWER), of_queries, 0.0)
