"""The references against each other: forms of one level, and levels that meet where a mechanism does nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from kda.golden import chunk_kda_golden, recurrent_kda_golden, rel_rmse
from kda.golden.constants import CHUNK_SIZE as BC

from .controls import chunked_without_shift, seq_in_loop_update_first
from .levels import level1, level2, level3, level4

LIMIT = 1e-14
"""Of the relative L2 difference of two references, both fp64: some fifty roundings."""

BLOCKS_V = (32, 64, 128)
SEEDS = 200


@dataclass(frozen=True)
class Check:
    """One line of the table: what was compared, how far off it was, and the range that this has to lie in."""

    level: int
    what: str
    error: float  # relative L2
    low: float = 0.0
    high: float = LIMIT

    @property
    def ok(self) -> bool:
        return self.low <= self.error <= self.high


@dataclass(frozen=True)
class Inputs:
    """What the levels take, fp64: q, k, v ~ N(0, 1), k of length 1 for the delta rule, decays and step sizes."""

    q: Tensor  # [B, N, H, K]
    k: Tensor  # [B, N, H, K]
    unit_k: Tensor  # [B, N, H, K]
    v: Tensor  # [B, N, H, V]
    head_g: Tensor  # [H] level 2's log decay
    g: Tensor  # [B, N, H, K] log decay of levels 3 and 5
    beta: Tensor  # [B, N, H]


def inputs(B: int, N: int, H: int, K: int, V: int, seed: int = 0) -> Inputs:
    """Drawn on the CPU, so that a seed means the same everywhere."""
    randn = functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q, k, v = randn(B, N, H, K), randn(B, N, H, K), randn(B, N, H, V)
    head_g, g, beta = logsigmoid(randn(H) + 2.0), logsigmoid(randn(B, N, H, K)), randn(B, N, H).sigmoid()
    return Inputs(q, k, normalize(k, dim=-1), v, head_g, g, beta)


def checks() -> list[Check]:
    """Every pair of references, then the two controls."""
    x = inputs(B=2, N=256, H=3, K=64, V=128)
    return [*_forms(x), *_tails(), *_descents(), *_controls(x)]


def kda_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Level 5, form A."""
    return recurrent_kda_golden(q, k, v, g, beta, scale=1.0)[0]


def kda_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, BC: int) -> Tensor:
    """Level 5, form B."""
    return chunk_kda_golden(q, k, v, g, beta, scale=1.0, chunk_size=BC)[0]


FORMS: dict[int, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    1: (level1.recurrent, level1.chunked),
    2: (level2.recurrent, level2.chunked),
    3: (level3.recurrent, level3.chunked),
    4: (level4.recurrent, level4.chunked),
    5: (kda_recurrent, kda_chunked),
}
"""Forms A and B of every level."""


def arguments(level: int, x: Inputs) -> tuple[Tensor, ...]:
    """What the level's forms and its kernel take."""
    return {
        1: (x.q, x.k, x.v),
        2: (x.q, x.k, x.v, x.head_g),
        3: (x.q, x.k, x.v, x.g),
        4: (x.q, x.unit_k, x.v, x.beta),
        5: (x.q, x.unit_k, x.v, x.g, x.beta),
    }[level]


def _forms(x: Inputs) -> list[Check]:
    q, k, v = arguments(1, x)
    a, b = level1.recurrent(q, k, v), level1.chunked(q, k, v, BC)
    c, d = level1.per_block(q, k, v, BC), {width: level1.seq_in_loop(q, k, v, BC, width) for width in BLOCKS_V}
    found = [Check(1, "B, chunked, against A, token by token", rel_rmse(b, a))]
    found += [Check(1, "C, per block, against A", rel_rmse(c, a)), Check(1, "C against B", rel_rmse(c, b))]
    found += [Check(1, f"D, sequence in the loop, {width} columns, against A", rel_rmse(d[width], a)) for width in d]
    narrow, *others = d.values()
    different = sum((narrow != other).sum().item() for other in others)
    found += [Check(1, "D: elements whose bits depend on the columns", float(different), high=0.0)]
    return found + [_b_against_a(level, x, "B, chunked, against A, token by token") for level in (2, 3, 4, 5)]


def _b_against_a(level: int, x: Inputs, what: str) -> Check:
    form_a, form_b = FORMS[level]
    given = arguments(level, x)
    return Check(level, what, rel_rmse(form_b(*given, BC), form_a(*given)))


def _tails() -> list[Check]:
    x = inputs(B=1, N=2 * BC + 37, H=2, K=32, V=48, seed=1)
    return [_b_against_a(level, x, f"B against A, last chunk of 37 of {BC}") for level in FORMS]


def _descents() -> list[Check]:
    """Where a mechanism does nothing, a level is the one that it was built on.

    The delta rule does nothing with step size 1 and keys that never meet: then the state holds nothing of a new key.
    Under decays for every channel, that takes keys of one channel each.
    """
    N = 64
    x = inputs(B=1, N=N, H=2, K=N, V=48, seed=2)
    axes = torch.eye(N, dtype=torch.float64)[torch.randperm(N, generator=torch.Generator().manual_seed(3))]
    axes = axes[None, :, None].expand(1, N, 2, N)
    ones, same_g = torch.ones_like(x.beta), x.head_g[:, None].expand_as(x.g)
    one, two, three, four, five = (form_a for form_a, _ in FORMS.values())
    q, k, v, g = x.q, x.unit_k, x.v, x.g
    return [
        Check(2, "without decay, against level 1", rel_rmse(two(q, k, v, 0 * x.head_g), one(q, k, v))),
        Check(3, "one decay for all, against level 2", rel_rmse(three(q, k, v, same_g), two(q, k, v, x.head_g))),
        Check(4, "keys that never meet, against level 1", rel_rmse(four(q, axes, v, ones), one(q, axes, v))),
        Check(5, "without decay, against level 4", rel_rmse(five(q, k, v, 0 * g, x.beta), four(q, k, v, x.beta))),
        Check(5, "keys that never meet, against level 3", rel_rmse(five(q, axes, v, g, ones), three(q, axes, v, g))),
    ]


def _controls(x: Inputs) -> list[Check]:
    """The faults, where they have to lie: D's at the shape of the forms, B's at a tiny one, once and on average."""
    q, k, v = arguments(1, x)
    update_first = rel_rmse(seq_in_loop_update_first(q, k, v, BC, 32), level1.recurrent(q, k, v))
    draws = []
    for seed in range(SEEDS):
        q, k, v = arguments(1, inputs(B=2, N=12, H=2, K=4, V=4, seed=seed))
        draws.append(rel_rmse(chunked_without_shift(q, k, v, 4), level1.recurrent(q, k, v)))
    return [
        Check(1, "control: D, update before write-back", update_first, 0.68, 0.72),
        Check(1, "control: B, no right shift, tiny", draws[0], 0.5, 1.1),
        Check(1, f"control: B, no right shift, tiny, mean of {SEEDS}", sum(draws) / SEEDS, 0.78, 0.82),
    ]
