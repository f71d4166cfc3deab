"""dM1, the gradients of the call's own tensors, back through what the operator applies to its inputs.

    norm   n = x r, r = 1 / sqrt(Σ x² + eps)      dx = r (dn - n (n · dn)), where dn is scale times the gradient for q
    gate   log decay  -A softplus(x)              dx = -A σ(x) d            dA_log = Σ (log decay) d
           log decay  lower_bound σ(A x)          dx = lower_bound A σ(A x) σ(-A x) d           dA_log = Σ x dx
    beta   σ(x), twice that with neg. eigenvalues dx = σ(x) σ(-x) d, twice that

A = exp(A_log), x = g + dt_bias, ddt_bias = Σ dx, and d is the gradient of the log decay; it counts as 0 where the log
decay is bounded by MIN_LOG_DECAY. σ(-x) stands for 1 - σ(x), of which rounding would leave nothing at large x.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..activation import Activation, inverse_norm
from ..constants import MIN_LOG_DECAY


class InputGradients(NamedTuple):
    """For each value head: those that share a head of q and k have not been summed.

    The last two mean something only where the gate has such a parameter.
    """

    dq: Tensor  # [..., C, K]
    dk: Tensor  # [..., C, K]
    dg: Tensor  # [..., C, K]
    dbeta: Tensor  # [..., C]
    dA_log: Tensor  # [...] summed over the chunk's tokens and channels
    ddt_bias: Tensor  # [..., K] summed over the chunk's tokens


def activate_backward(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, act: Activation,
    dq: Tensor, dk: Tensor, dbeta: Tensor, dg: Tensor, valid: Tensor | None = None,
) -> InputGradients:  # fmt: skip
    """From the inputs of M1 and the gradients of what it makes of them; `valid` as in `activate`."""
    if valid is not None:
        dg, dbeta = dg * valid.unsqueeze(-1), dbeta * valid
    dq = dq * act.scale
    if act.use_qk_l2norm_in_kernel:
        dq, dk = _norm_backward(q, dq), _norm_backward(k, dk)
    if act.use_beta_sigmoid_in_kernel:
        dbeta = act.step_size(beta) * torch.sigmoid(-beta) * dbeta
    raw_dg, dA_log = _gate_backward(g, act, dg.double())
    return InputGradients(dq, dk, raw_dg.to(dg.dtype), dbeta, dA_log.to(dg.dtype), raw_dg.sum(-2).to(dg.dtype))


def _norm_backward(x: Tensor, dn: Tensor) -> Tensor:
    shrink, inverse = inverse_norm(x)
    n = x * shrink * inverse
    return (dn - n * (n * dn).sum(-1, keepdim=True)) * inverse * shrink


def _gate_backward(g: Tensor, act: Activation, d: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of g `[..., C, K]` and of A_log `[...]` from that of the log decay, in fp64."""
    log_decay = act.unbounded_log_decay(g)
    free = log_decay >= MIN_LOG_DECAY
    d = d.where(free, 0.0)
    if not act.use_gate_in_kernel:
        return d, d.new_zeros(d.shape[:-2])
    x = act.gate_input(g)
    if act.lower_bound is None:
        return -act.rate * torch.sigmoid(x) * d, (log_decay.where(free, 0.0) * d).sum((-1, -2))
    y = act.rate * x
    dg = act.lower_bound * act.rate * torch.sigmoid(y) * torch.sigmoid(-y) * d
    return dg, (x * dg).sum((-1, -2))
