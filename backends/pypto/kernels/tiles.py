"""How the kernels cut their tensors: tile shapes within the vector units' buffer (192 KiB) and the cube's (512 KiB)."""

import pypto

from .constants import CHUNK

Tiles = dict[str, pypto.Tensor]
"""The tensors of a chunk by the golden's names."""


def use_tiles() -> None:
    """Tile shapes for matrices of CHUNK rows and up to CHUNK columns."""
    pypto.set_vec_tile_shapes(64, CHUNK)
    pypto.set_cube_tile_shapes([CHUNK, CHUNK], [CHUNK, CHUNK], [CHUNK, CHUNK])


def block(stacked: pypto.Tensor, index: int) -> pypto.Tensor:
    """Block `index` of `stacked` `[blocks * CHUNK, columns]`."""
    return pypto.view(stacked, [CHUNK, stacked.shape[1]], [index * CHUNK, 0])
