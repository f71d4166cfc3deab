"""M2 without the inverse: the decayed products inside a chunk, exact at every gate.

    Akk[i,j] = beta_i Σ_d k_i k_j exp(G_i - G_j), j < i          Aqk[i,j] = Σ_d q_i k_j exp(G_i - G_j), j <= i

At the level of a border b, for a row i right of it and a row j left of it,

    exp(G_i - G_j) = exp(g_b + ... + g_i) * exp(g_{j+1} + ... + g_{b-1})

so both factors are at most 1 whatever the gate, and the level is one product of two decayed matrices under its mask.
Each sum starts at its border and has terms of one sign: after a gate of -1000 the small ones are still exact.
q (scaled), k `[CHUNK, K]`, beta `[CHUNK, 1]`; decays `[(levels + 2) * CHUNK, K]`, exp of `decay_sums` times g.
"""

import pypto

from .constants import HALVES, IDENTITY
from .tiles import block


def scores(q: pypto.Tensor, k: pypto.Tensor, beta: pypto.Tensor, decays: pypto.Tensor, masks: pypto.Tensor
           ) -> tuple[pypto.Tensor, pypto.Tensor]:  # fmt: skip
    """Akk, strictly lower, and Aqk, lower, `[CHUNK, CHUNK]`."""
    Akk = None
    Aqk = pypto.where(block(masks, IDENTITY), pypto.matmul(q, k, pypto.DT_FP32, b_trans=True), 0.0)
    for level in range(len(HALVES)):
        decay, mask = block(decays, level), block(masks, level)
        k_decayed = k * decay
        at_level = pypto.where(mask, pypto.matmul(k_decayed, k_decayed, pypto.DT_FP32, b_trans=True), 0.0)
        Akk = at_level if Akk is None else Akk + at_level
        Aqk = Aqk + pypto.where(mask, pypto.matmul(q * decay, k_decayed, pypto.DT_FP32, b_trans=True), 0.0)
    return Akk * beta, Aqk
