"""M3, the WY form of a chunk: the corrections of all its tokens, and what meets the state, without the state.

w = Ainv (beta k exp G)        u = Ainv (beta v)
qg = q exp G                   kg = k exp(G_last - G)        decay = exp G_last
"""

import pypto

from .constants import CHUNK, FROM_START, TO_END
from .tiles import Tiles, block


def decayed(q: pypto.Tensor, k: pypto.Tensor, beta: pypto.Tensor, decays: pypto.Tensor) -> Tiles:
    """qg, kg, decay and kb = beta k exp G; q (scaled) and k `[CHUNK, K]`; decays, exp of `decay_sums` times g."""
    from_start = block(decays, FROM_START)
    return {
        "qg": q * from_start,
        "kg": k * block(decays, TO_END),
        "kb": k * from_start * beta,
        "decay": pypto.view(from_start, [1, k.shape[1]], [CHUNK - 1, 0]),
    }


def wy(kb: pypto.Tensor, v: pypto.Tensor, beta: pypto.Tensor, Ainv_t: pypto.Tensor) -> Tiles:
    """w and u; kb `[CHUNK, K]`, v `[CHUNK, V]`, beta `[CHUNK, 1]`, and the transposed inverse."""
    return {
        "w": pypto.matmul(Ainv_t, kb, pypto.DT_FP32, a_trans=True),
        "u": pypto.matmul(Ainv_t, v * beta, pypto.DT_FP32, a_trans=True),
    }
