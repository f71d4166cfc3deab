"""dM2, the gradients of M1's tensors and of v, back through the scores and the decays. With E_ij = exp(G_i - G_j):

    dq_i     = exp(G_i) dqg_i + Σ_{j<=i} dAqk_ij E_ij k_j
    dk_row_i = exp(G_i) dkb_i + Σ_{j<i} dAkk_ij E_ij k_j                                   of beta k, a row of Akk
    dk_col_j = exp(G_last - G_j) dkg_j + Σ_{i>=j} E_ij (dAqk_ij q_i + dAkk_ij beta_i k_i)  of k, a column of both
    dk = beta dk_row + dk_col        dbeta = Σ_V v db + Σ_K k dk_row        dv = beta db

The log decay g_t multiplies all that gets from a token before t, or from the state that enters the chunk, to a token
from t on, or to the state that leaves it. Its gradient is the sum of all this:

    dg_t = Σ_{i>=t} exp(G_i) (q_i dqg_i + beta_i k_i dkb_i) + Σ_{j<t} k_j (dk_col_j of the rows i >= t) + decay ddecay

Nothing is subtracted there, so dg_t is exact even where exp(g_t) is nearly 0. The same sum is that of the tokens from t
on over q dq + beta k dk_row - k dk_col; but at a closed gate that leaves what its neighbours are rounded by.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..exponential import exp
from ..scores import decays


class ActivatedGradients(NamedTuple):
    dq_activated: Tensor  # [..., C, K] of M1's q
    dk_activated: Tensor  # [..., C, K] of M1's k
    dbeta_activated: Tensor  # [..., C] of M1's beta
    dg_activated: Tensor  # [..., C, K] of each token's log decay
    dv: Tensor  # [..., C, V]


def scores_backward(
    q: Tensor, k: Tensor, beta: Tensor, G: Tensor, v: Tensor, db: Tensor,
    dAqk: Tensor, dAkk: Tensor, dqg: Tensor, dkb: Tensor, dkg: Tensor, ddecay: Tensor,
) -> ActivatedGradients:  # fmt: skip
    """From M1's tensors, v and db `[..., C, V]`, and dM3's tensors."""
    beta = beta.unsqueeze(-1)
    k_row, exp_G = beta * k, exp(G, k.dtype)
    dq, dk_row, dk_col = exp_G * dqg, exp_G * dkb, exp(G[..., -1:, :] - G, k.dtype) * dkg
    dg = (q * dq + k_row * dk_row).flip(-2).cumsum(-2).flip(-2) + (exp_G[..., -1, :] * ddecay).unsqueeze(-2)
    _add_scores(*(x.reshape(-1, *x.shape[-2:]) for x in (q, k, k_row, G, dAqk, dAkk, dq, dk_row, dk_col, dg)))
    return ActivatedGradients(
        dq_activated=dq,
        dk_activated=beta * dk_row + dk_col,
        dbeta_activated=(v * db).sum(-1) + (k * dk_row).sum(-1),
        dg_activated=dg,
        dv=beta * db,
    )


def _add_scores(
    q: Tensor, k: Tensor, k_row: Tensor, G: Tensor, dAqk: Tensor, dAkk: Tensor,
    dq: Tensor, dk_row: Tensor, dk_col: Tensor, dg: Tensor,
) -> None:  # fmt: skip
    """Add what comes through the scores to dq, dk_row, dk_col and dg; all tensors are `[chunks, C, ...]`.

    The rows come one by one, the last one first, so that after row i dk_col holds what the rows from i on give.
    """
    for s, i, decay in decays(G, k.dtype):
        dAqk_i, dAkk_i = dAqk[s, i, : i + 1, None], dAkk[s, i, : i + 1, None]
        decayed = decay * k[s, : i + 1]
        dq[s, i] += (dAqk_i.mT @ decayed)[:, 0]
        dk_row[s, i] += (dAkk_i.mT @ decayed)[:, 0]
        dk_col[s, : i + 1] += decay.mul_(dAqk_i * q[s, i, None] + dAkk_i * k_row[s, i, None])
        dg[s, i] += (k[s, :i] * dk_col[s, :i]).sum(1)
