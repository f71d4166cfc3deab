"""The four stages of the chunked form, each on tensors in chunk layout `[..., C, dim]`, fp32 or fp64.

    M1  activation    L2 norm, scale, gate, beta;  G = tril_incl(1) @ g
    M2  scores        Akk[i,j] = beta_i Σ_d k_i k_j exp(G_i - G_j), j < i
                      Aqk[i,j] = Σ_d q_i k_j exp(G_i - G_j), j <= i
        inverse       Ainv = (I + Akk)⁻¹
    M3  wy            w = Ainv (beta k exp G)     u = Ainv (beta v)
                      qg = q exp G                kg = k exp(G_last - G)       decay = exp G_last
    M4  carry         per chunk, in order:  v_new = u - w S;  o = qg S + Aqk v_new;  S <- diag(decay) S + kgᵀ v_new

Each is the function of that name in the module of that name, here and in every backend.

G is kept in fp64 whatever the dtype: after a strong gate it stands at thousands, where one fp32 ulp would spoil the
differences that follow.
"""

from __future__ import annotations

from torch import Tensor

from .activation import Activation, activate
from .carry import carry
from .inverse import inverse
from .scores import scores
from .wy import wy

STAGES: dict[str, tuple[str, ...]] = {
    "M1": ("q", "k", "beta", "G"),
    "M2": ("Akk", "Aqk", "Ainv"),
    "M3": ("qg", "kg", "decay", "w", "u"),
    "M4": ("h", "v_new"),
}
"""Stage -> the tensors it hands out, in the order of the pipeline."""

AXES = dict.fromkeys((name for names in STAGES.values() for name in names), "CK") | {
    "beta": "C", "Akk": "CC", "Aqk": "CC", "Ainv": "CC", "decay": "K", "u": "CV", "h": "KV", "v_new": "CV",
}  # fmt: skip
"""Each of these tensors -> its axes in every chunk and head."""


def stages(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, act: Activation, initial_state: Tensor,
    valid: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """All tensors named in `STAGES`, o and final_state, of consecutive chunks: the first axis counts them.

    q, k and g `[chunks, ..., C, K]` (g fp64), v `[chunks, ..., C, V]`, beta and `valid` `[chunks, ..., C]`, the state
    before the first chunk `[..., K, V]`. `valid` is False past a sequence's end; None if it is True everywhere.
    """
    m1 = activate(q, k, g, beta, act, valid)
    m2 = scores(*m1)
    Ainv = inverse(m2.Akk)
    m3 = wy(m1.q, m1.k, v, m1.beta, m1.G, Ainv)
    m4 = carry(m2.Aqk, *m3, initial_state)
    return m1._asdict() | m2._asdict() | {"Ainv": Ainv} | m3._asdict() | m4._asdict()
