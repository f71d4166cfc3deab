"""The four stages of the chunked form, each on tensors in chunk layout `[..., C, dim]`, fp32 or fp64.

    M1  L2 norm, scale, gate, beta;  G = tril_incl(1) @ g
    M2  Akk[i,j] = beta_i Σ_d k_i k_j exp(G_i - G_j), j < i;   Aqk[i,j] = Σ_d q_i k_j exp(G_i - G_j), j <= i
        Ainv = (I + Akk)⁻¹
    M3  w = Ainv (beta k exp G)     u = Ainv (beta v)
        qg = q exp G                kg = k exp(G_last - G)       decay = exp G_last
    M4  per chunk, in order:  v_new = u - w S;  o = qg S + Aqk v_new;  S <- diag(decay) S + kgᵀ v_new

G is kept in fp64 whatever the dtype: after a strong gate it stands at thousands, where one fp32 ulp would spoil the
differences that follow. Every exponent is a difference G_i - G_j with j <= i, hence never positive.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vecdot
from torch.nn.functional import threshold

from .activation import Activation

LOG2_E = math.log2(math.e)

STAGES: dict[str, tuple[str, ...]] = {
    "M1": ("q", "k", "beta", "G"),
    "M2": ("Akk", "Aqk", "Ainv"),
    "M3": ("qg", "kg", "decay", "w", "u"),
    "M4": ("h", "v_new"),
}
"""Stage -> the tensors it hands out, in the order of the pipeline."""

SLICE_ELEMENTS = 1 << 17
"""M2 forms the decays of one row against all earlier rows of the chunk, for as many chunks at a time as give at most
this many: few enough to stay in the cache."""


class M1(NamedTuple):
    q: Tensor  # [..., C, K] normalised and scaled
    k: Tensor  # [..., C, K] normalised
    beta: Tensor  # [..., C]
    G: Tensor  # [..., C, K] fp64, log decay from the chunk's start up to and including the row


class M2(NamedTuple):
    Akk: Tensor  # [..., C, C] strictly lower
    Aqk: Tensor  # [..., C, C] lower
    Ainv: Tensor  # [..., C, C] unit lower


class M3(NamedTuple):
    qg: Tensor  # [..., C, K]
    kg: Tensor  # [..., C, K]
    decay: Tensor  # [..., K]
    w: Tensor  # [..., C, K]
    u: Tensor  # [..., C, V]


class M4(NamedTuple):
    o: Tensor  # [chunks, ..., C, V]
    h: Tensor  # [chunks, ..., K, V] the state that enters each chunk
    v_new: Tensor  # [chunks, ..., C, V]
    final_state: Tensor  # [..., K, V]


def m1(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, act: Activation, valid: Tensor | None = None) -> M1:
    """q, k `[..., C, K]`, g `[..., C, K]`, beta `[..., C]`; `valid` `[..., C]` is False past a sequence's end.

    Rows past the end get g = 0 and beta = 0: G stays flat there, so that its last row is that of the last token,
    and the row writes nothing to the state.
    """
    q, k = act.queries(q), act.keys(k)
    g, beta = act.log_decay(g), act.step_size(beta)
    if valid is not None:
        g, beta = g * valid.unsqueeze(-1), beta * valid
    C = g.shape[-2]
    return M1(q, k, beta, torch.ones(C, C, dtype=g.dtype, device=g.device).tril() @ g)


def m2(q: Tensor, k: Tensor, beta: Tensor, G: Tensor) -> M2:
    """From M1's tensors; the decay is taken directly as exp(G_i - G_j), row by row of the chunk."""
    *lead, C, K = k.shape
    q, k, G = (x.reshape(-1, C, K) for x in (q, k, G))
    Akk, Aqk = k.new_zeros(2, len(k), C, C)
    step = max(1, SLICE_ELEMENTS // (C * K))
    for s in (slice(at, at + step) for at in range(0, len(k), step)):
        q_s, k_s, G_s = q[s], k[s], G[s]
        for i in range(C):
            decayed = _exp(G_s[:, i, None] - G_s[:, : i + 1], k.dtype).mul_(k_s[:, : i + 1])
            Akk[s, i, :i] = vecdot(decayed[:, :i], k_s[:, i, None])
            Aqk[s, i, : i + 1] = vecdot(decayed, q_s[:, i, None])
    Akk, Aqk = Akk.reshape(*lead, C, C), Aqk.reshape(*lead, C, C)
    Akk *= beta.unsqueeze(-1)
    eye = torch.eye(C, dtype=k.dtype, device=k.device)
    return M2(Akk, Aqk, torch.linalg.solve_triangular(eye + Akk, eye.expand_as(Akk), upper=False, unitriangular=True))


def m3(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, G: Tensor, Ainv: Tensor) -> M3:
    """From M1's tensors, v `[..., C, V]` and M2's inverse."""
    exp_G = _exp(G, k.dtype)
    beta = beta.unsqueeze(-1)
    return M3(
        qg=q * exp_G,
        kg=k * _exp(G[..., -1:, :] - G, k.dtype),
        decay=exp_G[..., -1, :].clone(),
        w=Ainv @ (beta * k * exp_G),
        u=Ainv @ (beta * v),
    )


def m4(Aqk: Tensor, qg: Tensor, kg: Tensor, decay: Tensor, w: Tensor, u: Tensor, initial_state: Tensor) -> M4:
    """From the tensors of M2 and M3, whose first axis counts the chunks, and the state `[..., K, V]` before them."""
    S, o, v_new = initial_state, torch.empty_like(u), torch.empty_like(u)
    h = S.new_empty(len(u), *S.shape)
    for c in range(len(u)):
        h[c] = S
        v_new[c] = u[c] - w[c] @ S
        o[c] = qg[c] @ S + Aqk[c] @ v_new[c]
        S = decay[c].unsqueeze(-1) * S + kg[c].mT @ v_new[c]
    return M4(o, h, v_new, S)


def _exp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """exp of the fp64 x <= 0, in `dtype`, taken as 2 to the x log2 e, and 0 where that is no normal number.

    Both are for speed alone: torch's fp32 exp is up to 40 times slower where it underflows, and so are products with
    subnormal numbers on many CPUs.
    """
    return threshold(x.to(dtype) * LOG2_E, math.log2(torch.finfo(dtype).tiny), -math.inf).exp2_()
