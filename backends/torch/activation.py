"""M1 without the cumsum: what the operator applies to its inputs before the recurrence."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from kda.backends.call import KdaCall, state_dtype
from kda.golden.constants import L2_NORM_EPS, L2_NORM_SHRINK, MIN_LOG_DECAY

from .layout import Piece


class Inputs(NamedTuple):
    """One piece's rows as the caller gave them, and the parameters of its heads."""

    q: Tensor  # [rows, H, K]
    k: Tensor  # [rows, H, K]
    v: Tensor  # [rows, HV, V]
    g: Tensor  # [rows, HV, K]
    beta: Tensor  # [rows, HV, 1]
    A_log: Tensor | None  # [HV]
    dt_bias: Tensor | None  # [HV, K]


class Activated(NamedTuple):
    """The same as the recurrence takes it: `[chunks, sequences, HV, C, dim]`, 0 past a sequence's end."""

    q: Tensor  # normalised and scaled
    k: Tensor  # normalised
    v: Tensor
    g: Tensor  # log decay, in [MIN_LOG_DECAY, 0]
    beta: Tensor  # step size, dim 1


def activate(call: KdaCall, piece: Piece, x: Inputs) -> Activated:
    """Bring a piece into chunk layout and apply L2 norm, scale, gate and beta's sigmoid as the call's flags say."""
    q, k, v, g, beta = (piece.to_table(rows).to(state_dtype(call.q.dtype)).contiguous() for rows in x[:5])
    if call.use_qk_l2norm_in_kernel:
        q, k = _l2_norm(q), _l2_norm(k)
    q = q * call.scale
    if call.HV > call.H:
        q, k = (t.repeat_interleave(call.HV // call.H, dim=2) for t in (q, k))
    if call.use_gate_in_kernel:
        g = gate(g, x.A_log, x.dt_bias, call.lower_bound)
    g = g.clamp(min=MIN_LOG_DECAY)
    if call.use_beta_sigmoid_in_kernel:
        # On a CPU in fp64: in fp32 the last elements of a tensor, which don't fill a vector register, have other bits
        # than those before them, so that a sequence's would depend on its neighbours.
        wide = beta.double() if beta.device.type == "cpu" else beta
        beta = torch.sigmoid(wide).to(beta.dtype) * (2.0 if call.allow_neg_eigval else 1.0)
    activated = Activated(q, k, v, g, beta)
    if piece.valid is None:
        return activated
    past = ~piece.valid[:, :, None, :, None]
    return Activated(*(t.masked_fill(past, 0.0) for t in activated))


def _l2_norm(x: Tensor) -> Tensor:
    with torch.no_grad():
        squares = x.square().sum(-1, keepdim=True)
        too_large = squares.isinf()
        shrink = torch.ones_like(squares).masked_fill(too_large, L2_NORM_SHRINK)
        eps = torch.full_like(squares, L2_NORM_EPS).masked_fill(too_large, 0.0)
    x = x * shrink
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """Log decay: -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)).

    g `[..., HV, rows, K]`, A_log `[HV]` or None beside a lower_bound, dt_bias `[HV, K]`.
    """
    if dt_bias is not None:
        g = g + dt_bias.to(g.dtype).unsqueeze(-2)
    if A_log is None and lower_bound is not None:
        return lower_bound * torch.sigmoid(g)
    assert A_log is not None, "the front end sees to it"
    # A saturated gate has gradient 0, and 0 * exp(A_log) must not become NaN by an infinite exp(A_log).
    rate = A_log.to(g.dtype).clamp(max=math.log(torch.finfo(g.dtype).max) - 1.0).exp()[:, None, None]
    return -rate * softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(rate * g)
