"""The way in and out: a chunk's rows of one head, and the state of one sequence and head."""

import pypto

from ..config import Config
from .constants import CHUNK
from .tiles import COLUMNS, ROWS, use_tiles

Index = pypto.SymbolicScalar | int


def load(x: pypto.Tensor, t: Index, head: Index, count: Index) -> pypto.Tensor:
    """Rows t, t + 1, ... of `x` `[T, heads, D]` as `[CHUNK, D]`, the first `count` of them valid, by tiles of rows."""
    return _load(x, t, head, count, ROWS, max(x.shape[2], 16))  # a tile row is at least 32 bytes


def load_columns(x: pypto.Tensor, t: Index, head: Index, count: Index) -> pypto.Tensor:
    """The same by tiles of columns."""
    return _load(x, t, head, count, CHUNK, COLUMNS)


def _load(x: pypto.Tensor, t: Index, head: Index, count: Index, rows: int, columns: int) -> pypto.Tensor:
    D = x.shape[2]
    pypto.set_vec_tile_shapes(rows, 1, columns)
    strided = pypto.view(x, [CHUNK, 1, D], [t, head, 0], valid_shape=[count, 1, D])
    return pypto.reshape(strided, [CHUNK, D], valid_shape=[count, D])


def store(x: pypto.Tensor, out: pypto.Tensor, t: Index, head: Index, count: Index) -> None:
    """The first `count` rows of `x` `[CHUNK, D]` to rows t, t + 1, ... of `out` `[T, heads, D]`, in its dtype."""
    D = x.shape[1]
    valid = pypto.cast(pypto.view(x, [CHUNK, D], [0, 0], valid_shape=[count, D]), out.dtype)
    pypto.set_vec_tile_shapes(64, 1, D)
    pypto.assemble(pypto.reshape(valid, [CHUNK, 1, D], valid_shape=[count, 1, D]), [t, head, 0], out)
    use_tiles()


def parameter(x: pypto.Tensor, head: Index) -> pypto.Tensor:
    """The row of a head `[1, K]`."""
    return pypto.view(x, [1, x.shape[1]], [head, 0])


def state(states: pypto.Tensor, n: Index, head: Index, config: Config) -> pypto.Tensor:
    """State n of a head as `[V, K]`."""
    *_, rows, columns = states.shape
    pypto.set_vec_tile_shapes(1, 1, 64, columns)
    found = pypto.reshape(pypto.view(states, [1, 1, rows, columns], [n, head, 0, 0]), [rows, columns])
    use_tiles()
    return found if config.state_v_first else pypto.transpose(found, 0, 1)


def load_state(states: pypto.Tensor, n: Index, head: Index, config: Config) -> pypto.Tensor:
    """The same as a tensor of its own, that may be changed."""
    found = state(states, n, head, config)
    return pypto.clone(found) if config.state_v_first else found


def store_state(S: pypto.Tensor, states: pypto.Tensor, n: Index, head: Index, config: Config) -> None:
    """S `[V, K]` to state n of a head."""
    store_table(S if config.state_v_first else pypto.transpose(S, 0, 1), states, n, head)


def store_table(x: pypto.Tensor, table: pypto.Tensor, n: Index, head: Index) -> None:
    """The matrix `x` to entry n of a head in `table` `[entries, heads, rows, columns]`."""
    rows, columns = x.shape
    pypto.set_vec_tile_shapes(1, 1, min(rows, 64), max(columns, 16))
    pypto.assemble(pypto.reshape(x, [1, 1, rows, columns]), [n, head, 0, 0], table)
    use_tiles()
