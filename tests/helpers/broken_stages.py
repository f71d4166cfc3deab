"""The golden's stages, each broken on purpose in a way that a kernel might be: whoever judges kernels must see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda.golden.activation import Activated, activate
from kda.golden.carry import Carried, carry
from kda.golden.scores import Scores, scores


class Broken(NamedTuple):
    """What stands in a stage's place in `kda.golden.stages`."""

    stage: str
    replacement: Callable[..., Any]


def _without_tail_zeros(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, act: Any, valid: Tensor | None = None
) -> Activated:
    return activate(q, k, g, beta, act)


def _without_beta(q: Tensor, k: Tensor, beta: Tensor, G: Tensor) -> Scores:
    return scores(q, k, torch.ones_like(beta), G)


def _clamped_at_80(q: Tensor, k: Tensor, beta: Tensor, G: Tensor) -> Scores:
    G = G - G[..., :1, :]
    near, far = G.exp().to(k.dtype), (-G).clamp(max=80).exp().to(k.dtype)
    Akk = ((beta.unsqueeze(-1) * k * near) @ (k * far).mT).tril(-1)
    return Scores(Akk, ((q * near) @ (k * far).mT).tril())


def _scores_in_fp32(q: Tensor, k: Tensor, beta: Tensor, G: Tensor) -> Scores:
    return scores(q, k, beta, G.float())


def _no_inverse(Akk: Tensor) -> Tensor:
    return torch.eye(Akk.shape[-1], dtype=Akk.dtype).expand_as(Akk)


def _without_right_shift(
    Aqk: Tensor, qg: Tensor, kg: Tensor, decay: Tensor, w: Tensor, u: Tensor, initial_state: Tensor
) -> Carried:
    good = carry(Aqk, qg, kg, decay, w, u, initial_state)
    after = torch.cat([good.h[1:], good.final_state[None]])
    return good._replace(o=qg @ after + Aqk @ good.v_new, h=after)


WITHOUT_TAIL_ZEROS = Broken("activate", _without_tail_zeros)
"""Rows past a sequence's end are taken for tokens."""

WITHOUT_BETA = Broken("scores", _without_beta)

CLAMPED_AT_80 = Broken("scores", _clamped_at_80)
"""One pivot for the whole chunk, its growing factor cut off where fp32 would overflow."""

SCORES_IN_FP32 = Broken("scores", _scores_in_fp32)
"""Differences of G once it has been rounded to fp32."""

WITHOUT_INVERSE = Broken("inverse", _no_inverse)

WITHOUT_RIGHT_SHIFT = Broken("carry", _without_right_shift)
"""The state takes in the chunk before the chunk reads it."""
