"""M1: what the operator applies to its inputs (L2 norm, scale, gate, beta), and the cumsum of the gate in a chunk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .constants import L2_NORM_EPS, L2_NORM_SHRINK, MIN_LOG_DECAY

MAX_RATE = 1e300
"""exp(A_log) is bounded here, where every gate has long been shut or open: 0 times an infinite one would be NaN."""


@dataclass(frozen=True)
class Activation:
    """The flags and parameters of the operator's input side.

    A_log must broadcast against g, `[..., HV, 1]`, and so must dt_bias, `[..., HV, K]`.
    """

    scale: float = 1.0
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    lower_bound: float | None = None

    def chunked(self, heads: slice) -> Activation:
        """The same for some of the value heads, in chunk layout, where the tokens lie between heads and channels."""
        return replace(
            self,
            A_log=None if self.A_log is None else self.A_log[heads, None],
            dt_bias=None if self.dt_bias is None else self.dt_bias[heads, None],
        )

    def queries(self, q: Tensor) -> Tensor:
        return (l2_norm(q) if self.use_qk_l2norm_in_kernel else q) * self.scale

    def keys(self, k: Tensor) -> Tensor:
        return l2_norm(k) if self.use_qk_l2norm_in_kernel else k

    @property
    def rate(self) -> Tensor | float:
        """exp(A_log) in fp64."""
        return 1.0 if self.A_log is None else self.A_log.double().exp().clamp(max=MAX_RATE)

    def gate_input(self, g: Tensor) -> Tensor:
        """g + dt_bias in fp64."""
        return g.double() if self.dt_bias is None else g.double() + self.dt_bias.double()

    def log_decay(self, g: Tensor) -> Tensor:
        """Log decay per token and channel in fp64, within [MIN_LOG_DECAY, 0]."""
        return self.unbounded_log_decay(g).clamp(min=MIN_LOG_DECAY)

    def unbounded_log_decay(self, g: Tensor) -> Tensor:
        """The same in [-inf, 0]: g itself or, where it is a raw gate, -exp(A_log) softplus(g + dt_bias) or, with a
        lower bound, lower_bound * sigmoid(exp(A_log) (g + dt_bias)).
        """
        if not self.use_gate_in_kernel:
            return g.double()
        if self.lower_bound is not None:
            return self.lower_bound * torch.sigmoid(self.rate * self.gate_input(g))
        if self.A_log is None:
            raise ValueError("A_log: expected with use_gate_in_kernel unless lower_bound is set, got None")
        return -self.rate * softplus(self.gate_input(g))

    def step_size(self, beta: Tensor) -> Tensor:
        if not self.use_beta_sigmoid_in_kernel:
            return beta
        return torch.sigmoid(beta) * (2.0 if self.allow_neg_eigval else 1.0)


class Activated(NamedTuple):
    q: Tensor  # [..., C, K] normalised and scaled
    k: Tensor  # [..., C, K] normalised
    beta: Tensor  # [..., C]
    G: Tensor  # [..., C, K] fp64, log decay from the chunk's start up to and including the row


def activate(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, act: Activation, valid: Tensor | None = None) -> Activated:
    """q, k `[..., C, K]`, g `[..., C, K]`, beta `[..., C]`; `valid` `[..., C]` is False past a sequence's end.

    Rows past the end get g = 0 and beta = 0: G stays flat there, so that its last row is that of the last token,
    and the row writes nothing to the state.
    """
    q, k = act.queries(q), act.keys(k)
    g, beta = act.log_decay(g), act.step_size(beta)
    if valid is not None:
        g, beta = g * valid.unsqueeze(-1), beta * valid
    C = g.shape[-2]
    return Activated(q, k, beta, torch.ones(C, C, dtype=g.dtype, device=g.device).tril() @ g)


def l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x²) + eps) over the last axis."""
    shrink, inverse = inverse_norm(x)
    return x * shrink * inverse


def inverse_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """1 / sqrt(sum(x²) + eps) over the last axis, which stays with size 1.

    It comes as two factors, to be multiplied with one after the other: of huge rows, the product alone may underflow.
    """
    squares = x.square().sum(-1, keepdim=True)
    too_large = squares.isinf()
    shrink = torch.ones_like(squares).masked_fill(too_large, L2_NORM_SHRINK)
    eps = torch.full_like(squares, L2_NORM_EPS).masked_fill(too_large, 0.0)
    return shrink, torch.rsqrt((x * shrink).square().sum(-1, keepdim=True) + eps)
