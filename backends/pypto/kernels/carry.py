"""M4, the state carried from chunk to chunk:

    v_new = u - w Sᵀ        o = qg Sᵀ + Aqk v_new        S <- S diag(decay) + v_newᵀ kg

The state is S `[V, K]`: the decay is then a row that spreads over all others, and no stage transposes it.
"""

import pypto

from .tiles import Tiles


def carry(tiles: Tiles, S: pypto.Tensor) -> Tiles:
    """v_new and o `[CHUNK, V]`, and the state S `[V, K]` after the chunk."""
    v_new = tiles["u"] - pypto.matmul(tiles["w"], S, pypto.DT_FP32, b_trans=True)
    from_state = pypto.matmul(tiles["qg"], S, pypto.DT_FP32, b_trans=True)
    return {
        "v_new": v_new,
        "o": from_state + pypto.matmul(tiles["Aqk"], v_new, pypto.DT_FP32),
        "S": S * tiles["decay"] + pypto.matmul(v_new, tiles["kg"], pypto.DT_FP32, a_trans=True),
    }
