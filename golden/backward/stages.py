"""The four stages of the backward pass in the order in which they run, in chunk layout `[..., C, dim]`, fp32 or fp64.

    dM4  carry        per chunk, the last one first:  dv_new = Aqkᵀ do + kg dh;  db = Ainvᵀ dv_new;
                      dh <- diag(decay) dh + qgᵀ do - wᵀ dv_new
    dM3  wy           dAqk = tril(do v_newᵀ)     dAkk = -stril(db v_newᵀ)
                      dqg = do hᵀ                dkb = -db hᵀ               dkg = v_new dhᵀ        ddecay = Σ_V h dh
    dM2  scores       the gradients of M1's q, k and beta, of the log decay of each token, and of v
    dM1  activation   the gradients of the inputs, for each value head

They read the tensors of the forward stages M1 to M4. A gradient is named after its tensor, with a d in front.
"""

from __future__ import annotations

from torch import Tensor

from ..activation import Activation
from ..stages import STAGES
from .activation import activate_backward
from .carry import carry_backward
from .scores import scores_backward
from .wy import wy_backward

BACKWARD_STAGES: dict[str, tuple[str, ...]] = {
    "dM4": ("dv_new", "db", "dh"),
    "dM3": ("dAqk", "dAkk", "dqg", "dkb", "dkg", "ddecay"),
    "dM2": ("dq_activated", "dk_activated", "dbeta_activated", "dg_activated", "dv"),
    "dM1": ("dq", "dk", "dg", "dbeta", "dA_log", "ddt_bias"),
}
"""Stage -> the tensors it hands out, in the order in which they depend on one another."""

BACKWARD_AXES = dict.fromkeys((name for names in BACKWARD_STAGES.values() for name in names), "CK") | {
    "dv_new": "CV", "db": "CV", "dh": "KV", "dAqk": "CC", "dAkk": "CC", "ddecay": "K",
    "dbeta_activated": "C", "dv": "CV", "dbeta": "C", "dA_log": "", "ddt_bias": "K",
}  # fmt: skip
"""Each of these tensors -> its axes in every chunk and head."""


def backward_stages(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, act: Activation, valid: Tensor | None,
    forward: dict[str, Tensor], do: Tensor, d_final_state: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    """All tensors named in `BACKWARD_STAGES`, and d_initial_state, of consecutive chunks: the first axis counts them.

    The inputs are those of `stages`, and `forward` is what it made of them. do `[chunks, ..., C, V]` is 0 past a
    sequence's end; d_final_state and d_initial_state `[..., K, V]` belong to the states behind and before the chunks.
    """
    m1 = {name: forward[name] for name in STAGES["M1"]}
    carried = {name: forward[name] for name in ("Aqk", "Ainv", "qg", "kg", "decay", "w")}
    dm4 = carry_backward(**carried, do=do, d_final_state=d_final_state)
    dm3 = wy_backward(forward["h"], forward["v_new"], do, dm4.db, dm4.dh)
    dm2 = scores_backward(**m1, v=v, db=dm4.db, **dm3._asdict())
    dm1 = activate_backward(q, k, g, beta, act, *dm2[:4], valid)
    return dm4._asdict() | dm3._asdict() | dm2._asdict() | dm1._asdict()
