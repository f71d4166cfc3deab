"""The golden's token recurrence: it is the paper's, and continues from its own state."""

from __future__ import annotations

from typing import Any

import torch
from golden_calls import PER_TOKEN
from torch import Tensor

from kda.golden import inputs, recurrent_kda_golden, rel_rmse


def by_hand(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The paper's recurrence in its other orientation, S [V, K], one head at a time, with every flag on."""
    q, k, v, g, beta = (call[name].double() for name in PER_TOKEN)
    (B, T, HV, V), (H, K) = v.shape, q.shape[2:]
    o, state = torch.zeros_like(v), torch.zeros(B, HV, V, K, dtype=torch.float64)
    for b in range(B):
        for h in range(HV):
            S = call["initial_state"][b, h].double()
            for t in range(T):
                x, y = q[b, t, h * H // HV], k[b, t, h * H // HV]
                x, y = x / (x @ x + 1e-6).sqrt() / K**0.5, y / (y @ y + 1e-6).sqrt()
                raw = g[b, t, h] + call["dt_bias"].double().view(HV, K)[h]
                alpha = torch.exp(-call["A_log"][h].double().exp() * torch.log1p(raw.exp()))
                step = 1 / (1 + torch.exp(-beta[b, t, h]))
                S = S * alpha @ (torch.eye(K) - step * torch.outer(y, y)) + step * torch.outer(v[b, t, h], y)
                o[b, t, h] = S @ x
            state[b, h] = S
    return o, state


def test_recurrence_is_the_papers() -> None:
    call = inputs.raw(2, 9, 2, 16, V=8, HV=4, initial_state=True)
    for actual, expected in zip(recurrent_kda_golden(**call), by_hand(call), strict=True):
        assert rel_rmse(actual, expected) < 1e-12


def test_recurrence_continues_from_its_own_state() -> None:
    call = inputs.stable(2, 50, 3, 16)
    o, state = recurrent_kda_golden(**call)
    first, second = ({n: x[:, t] if n in PER_TOKEN else x for n, x in call.items()}
                     for t in (slice(0, 20), slice(20, 50)))  # fmt: skip
    o_1, middle = recurrent_kda_golden(**first)
    o_2, last = recurrent_kda_golden(**second, initial_state=middle)
    assert torch.equal(torch.cat([o_1, o_2], 1), o) and torch.equal(last, state)
