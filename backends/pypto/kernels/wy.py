"""M3, the WY form of a chunk: the corrections of all its tokens, and what meets the state, without the state.

w = Ainv (beta k exp G)        u = Ainv (beta v)
qg = q exp G                   kg = k exp(G_last - G)        decay = exp G_last
"""

import pypto

from .constants import CHUNK, FROM_START, TO_END
from .tiles import Tiles, block


def wy(q: pypto.Tensor, k: pypto.Tensor, v: pypto.Tensor, beta: pypto.Tensor, decays: pypto.Tensor, Ainv: pypto.Tensor
       ) -> Tiles:  # fmt: skip
    """q (scaled) and k `[CHUNK, K]`, v `[CHUNK, V]`, beta `[CHUNK, 1]`; decays, exp of `decay_sums` times g."""
    from_start = block(decays, FROM_START)
    return {
        "qg": q * from_start,
        "kg": k * block(decays, TO_END),
        "decay": pypto.view(from_start, [1, k.shape[1]], [CHUNK - 1, 0]),
        "w": pypto.matmul(Ainv, k * from_start * beta, pypto.DT_FP32),
        "u": pypto.matmul(Ainv, v * beta, pypto.DT_FP32),
    }
