"""The ladder's references: the recurrences by hand, every form against every other, and faults that show."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kda.golden import rel_rmse
from kda.ladder import consistency, controls
from kda.ladder.consistency import FORMS, Check, arguments, checks, inputs
from kda.ladder.levels import level1, level2, level3, level4

pytestmark = pytest.mark.usefixtures("one_thread")


def one_head(*rows: list[float]) -> Tensor:
    """`[1, N, 1, dim]` from N rows."""
    return torch.tensor(rows, dtype=torch.float64)[None, :, None]


Q, K, V = one_head([1, 2], [3, 1], [1, 1]), one_head([1, 0], [1, 1], [0, 2]), one_head([1], [10], [100])
HALF = math.log(0.5)


def test_recurrences_by_hand() -> None:
    """S after each token is in the comments; o = qᵀ S."""
    assert level1.recurrent(Q, K, V).flatten().tolist() == [1, 43, 221]  # (1, 0) (11, 10) (11, 210)
    halves = level2.recurrent(Q, K, V, torch.tensor([HALF]))
    assert halves.flatten().tolist() == pytest.approx([1, 41.5, 210.25])  # (1, 0) (10.5, 10) (5.25, 205)
    g = one_head([0, 0], [HALF, 0], [0, HALF])
    channels = level3.recurrent(Q, K, V, g)
    assert channels.flatten().tolist() == pytest.approx([1, 41.5, 215.5])  # (1, 0) (10.5, 10) (10.5, 205)
    beta = torch.tensor([1.0, 0.5, 0.25])[None, :, None]
    # (1, 0); missing 9, half of it: (5.5, 4.5); missing 91, a quarter of it twice: (5.5, 50)
    assert level4.recurrent(Q, K, V, beta).flatten().tolist() == [1, 21, 55.5]


def test_every_check_holds() -> None:
    found = checks()
    assert {check.level for check in found} == {1, 2, 3, 4, 5}
    assert not [check for check in found if not check.ok]


def test_a_check_is_a_range() -> None:
    assert Check(1, "", 1e-15).ok and not Check(1, "", 1e-13).ok and not Check(1, "", math.nan).ok
    assert not Check(1, "", 0.6, 0.68, 0.72).ok


@pytest.mark.parametrize("level", FORMS)
@pytest.mark.parametrize("BC", [1, 16, 100])
def test_any_chunk_and_length(level: int, BC: int) -> None:
    form_a, form_b = FORMS[level]
    for N in (1, BC, BC + 1, 70):
        x = arguments(level, inputs(B=2, N=N, H=2, K=5, V=3, seed=N))
        assert rel_rmse(form_b(*x, BC), form_a(*x)) <= consistency.LIMIT, N
        assert form_a(*(t.float() for t in x)).dtype == torch.float64


@pytest.mark.parametrize("BC", [16, 64])
def test_level_one_c_and_d_take_tails(BC: int) -> None:
    x = arguments(1, inputs(B=1, N=75, H=2, K=5, V=10))
    expected = level1.recurrent(*x)
    assert rel_rmse(level1.per_block(*x, BC), expected) <= consistency.LIMIT
    assert rel_rmse(level1.seq_in_loop(*x, BC, 4), expected) <= consistency.LIMIT  # 10 columns by 4


@pytest.mark.parametrize("level", [2, 3])
def test_strong_gates(level: int) -> None:
    """From no decay at all to minus infinity, side by side."""
    form_a, form_b = FORMS[level]
    q, k, v, g = arguments(level, inputs(B=1, N=150, H=5, K=8, V=3))
    strong = torch.tensor([0.0, -1e-3, -5.0, -1000.0, -math.inf], dtype=torch.float64)
    g = strong if level == 2 else strong[torch.randint(5, g.shape, generator=torch.Generator().manual_seed(0))]
    o = form_b(q, k, v, g, 64)
    assert o.isfinite().all() and rel_rmse(o, form_a(q, k, v, g)) <= 1e-12


def test_faults_show() -> None:
    x = arguments(1, inputs(B=1, N=64, H=1, K=8, V=4))
    assert rel_rmse(controls.chunked_without_shift(*x, 16), level1.recurrent(*x)) > 0.1
    assert rel_rmse(controls.seq_in_loop_update_first(*x, 16, 2), level1.recurrent(*x)) > 0.1


def test_a_broken_reference_turns_the_table_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(level1, "chunked", controls.chunked_without_shift)
    red = [check.what for check in checks() if not check.ok]
    assert "C against B" in red
