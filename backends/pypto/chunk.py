"""M1 to M4 of one chunk of one head, on fp32 tiles; CHUNK rows, 0 past the end of the sequence.

    M1  q, k, g, beta as activated          decays = exp(decay_sums @ g)
    M2  Akk, Aqk (scores)                   Ainv = (I + Akk)⁻¹ (block_inverse)
    M3  w = Ainv (beta k exp G)             u = Ainv (beta v)
        qg = q exp G                        kg = k exp(G_last - G)         decay = exp G_last
    M4  v_new = u - w Sᵀ                    o = qg Sᵀ + Aqk v_new          S <- S diag(decay) + v_newᵀ kg

The carried state is S `[V, K]`: the decay is then a row that spreads over all others, and no stage transposes it.
"""

import pypto

from .activation import keys, log_decay, queries, step_size
from .block_inverse import unit_lower_inverse
from .config import Config
from .constants import CHUNK, FROM_START, TO_END
from .scores import scores
from .tiles import block, use_tiles

Tiles = dict[str, pypto.Tensor]


def activate(q: pypto.Tensor, k: pypto.Tensor, v: pypto.Tensor, g: pypto.Tensor, beta: pypto.Tensor,
             rate: pypto.Tensor, bias: pypto.Tensor, config: Config) -> Tiles:  # fmt: skip
    """M1 without the cumsum: q, k, g `[CHUNK, K]`, v `[CHUNK, V]`, beta `[CHUNK, 1]`; rate and bias `[1, K]`.

    A row that is filled with 0 neither decays nor writes, and G stays flat over it: the chunk's last row has the decay
    of the sequence's last token.
    """
    use_tiles()
    tiles = {
        "q": queries(q, config), "k": keys(k, config), "v": pypto.cast(v, pypto.DT_FP32),
        "g": log_decay(g, rate, bias, config), "beta": step_size(beta, config),
    }  # fmt: skip
    return {name: pypto.fillpad(tile, "constant", 0.0) for name, tile in tiles.items()}


def prepare(q: pypto.Tensor, k: pypto.Tensor, v: pypto.Tensor, g: pypto.Tensor, beta: pypto.Tensor,
            sums: pypto.Tensor, masks: pypto.Tensor) -> Tiles:  # fmt: skip
    """The cumsum of M1, then M2 and M3: all that does not need the state."""
    log_decays = pypto.matmul(sums, g, pypto.DT_FP32)
    decays = pypto.exp(log_decays)
    from_start = block(decays, FROM_START)
    Akk, Aqk = scores(q, k, beta, decays, masks)
    Ainv = unit_lower_inverse(Akk, masks)
    return {
        "G": block(log_decays, FROM_START), "Akk": Akk, "Aqk": Aqk, "Ainv": Ainv,
        "qg": q * from_start,
        "kg": k * block(decays, TO_END),
        "decay": pypto.view(from_start, [1, k.shape[1]], [CHUNK - 1, 0]),
        "w": pypto.matmul(Ainv, k * from_start * beta, pypto.DT_FP32),
        "u": pypto.matmul(Ainv, v * beta, pypto.DT_FP32),
    }  # fmt: skip


def carry(tiles: Tiles, S: pypto.Tensor) -> Tiles:
    """M4: v_new and o `[CHUNK, V]`, and the state S `[V, K]` after the chunk."""
    v_new = tiles["u"] - pypto.matmul(tiles["w"], S, pypto.DT_FP32, b_trans=True)
    from_state = pypto.matmul(tiles["qg"], S, pypto.DT_FP32, b_trans=True)
    return {
        "v_new": v_new,
        "o": from_state + pypto.matmul(tiles["Aqk"], v_new, pypto.DT_FP32),
        "S": S * tiles["decay"] + pypto.matmul(v_new, tiles["kg"], pypto.DT_FP32, a_trans=True),
    }
