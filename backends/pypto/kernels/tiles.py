"""How the kernels cut their tensors: tile shapes within the vector units' buffer (192 KiB) and the cube's (512 KiB)."""

import pypto

from kda.golden.constants import SUB_BLOCK

from .constants import CHUNK

Tiles = dict[str, pypto.Tensor]
"""The tensors of a chunk by the golden's names."""

ROWS, COLUMNS = 64, 32
"""Rows of a tile of whole rows, and columns of a tile of whole columns: in fp32, 32 and 16 KiB."""

BLOCKS = CHUNK // SUB_BLOCK


def use_tiles() -> None:
    """Tile shapes for matrices of CHUNK rows and up to CHUNK columns: for what goes along a row."""
    pypto.set_vec_tile_shapes(ROWS, CHUNK)
    use_cube(CHUNK, CHUNK, CHUNK)


def use_columns() -> None:
    """The same for what goes along a column."""
    pypto.set_vec_tile_shapes(CHUNK, COLUMNS)


def use_blocks() -> None:
    """The tiles of `use_columns`, seen as `[BLOCKS, SUB_BLOCK, ...]`."""
    pypto.set_vec_tile_shapes(BLOCKS, SUB_BLOCK, COLUMNS)


def use_cube(rows: int, inner: int, columns: int) -> None:
    """One product, `[rows, inner]` times `[inner, columns]`, at once."""
    pypto.set_cube_tile_shapes([rows, rows], [inner, inner], [columns, columns])


def begin_task(number: int) -> None:
    """From here on, what is computed from one tile is one task, and all of it stays in the buffer.

    The number tells such stretches of a kernel apart.
    """
    pypto.set_pass_options(sg_set_scope=number)


def end_task() -> None:
    """Back to tasks as PyPTO's compiler cuts them."""
    pypto.set_pass_options(sg_set_scope=-1)


def block(stacked: pypto.Tensor, index: int) -> pypto.Tensor:
    """Block `index` of `stacked` `[blocks * CHUNK, columns]`."""
    return pypto.view(stacked, [CHUNK, stacked.shape[1]], [index * CHUNK, 0])


def flat(x: pypto.Tensor) -> pypto.Tensor:
    """`[blocks, rows, columns]` as `[blocks * rows, columns]`."""
    blocks, rows, columns = x.shape
    return pypto.reshape(x, [blocks * rows, columns])
