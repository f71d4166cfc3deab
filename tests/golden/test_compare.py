"""The element-wise comparer: what it lets pass, what it counts, what it reports."""

from __future__ import annotations

import math
from importlib import import_module

import pytest
import torch

from kda.golden import compare, rel_rmse
from kda.golden.compare import WORST


@pytest.fixture
def expected() -> torch.Tensor:
    return torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)) + 10


def test_equal_is_ok(expected: torch.Tensor) -> None:
    result = compare(expected.clone(), expected, atol=0, rtol=0, max_rel_rmse=0)
    assert result.ok and result.bad == 0 and result.max_diff == result.rel_rmse == 0
    assert str(result).startswith("ok: 0 of 60 elements")


def test_statistics_and_worst_elements(expected: torch.Tensor) -> None:
    actual = expected.double()
    actual[0, 1, 2] += 3
    actual[2, 3, 4] -= 7
    actual[1, 1, 1] += 1e-3
    diff = (actual - expected.double()).abs()
    result = compare(actual, expected, atol=1e-2, rtol=0)
    assert not result.ok and result.bad == 2 and result.bad_share == 2 / 60
    assert result.max_diff == pytest.approx(7)
    assert result.mean_diff == pytest.approx(diff.mean().item())
    assert result.std_diff == pytest.approx(diff.std(correction=0).item())
    assert result.rel_rmse == pytest.approx((diff.norm() / expected.double().norm()).item())
    assert [e.index for e in result.worst[:3]] == [(2, 3, 4), (0, 1, 2), (1, 1, 1)]
    assert len(result.worst) == WORST
    assert "worst at [2, 3, 4]" in str(result) and "off by 7.000e+00" in str(result)


def test_tolerances(expected: torch.Tensor) -> None:
    assert compare(expected * 1.009, expected, atol=0, rtol=1e-2).ok
    assert not compare(expected * 1.011, expected, atol=0, rtol=1e-2).ok
    assert compare(expected + 9e-3, expected, atol=1e-2, rtol=0).ok
    assert not compare(expected + 1.1e-2, expected, atol=1e-2, rtol=0).ok


def test_rel_rmse_alone_can_fail(expected: torch.Tensor) -> None:
    small = 1e-4 * expected
    assert compare(2 * small, small, atol=1e-2, rtol=0).ok
    result = compare(2 * small, small, atol=1e-2, rtol=0, max_rel_rmse=5e-3)
    assert not result.ok and result.bad == 0 and "(limit 5.0e-03)" in str(result)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_fails_and_is_located(expected: torch.Tensor, value: float) -> None:
    actual = expected.clone()
    actual[1, 2, 3] = actual[2, 0, 0] = value
    result = compare(actual, expected, atol=1e9, rtol=1e9, max_rel_rmse=1)
    assert not result.ok and result.bad == result.nonfinite == 2
    assert [e.index for e in result.first_nonfinite] == [(1, 2, 3), (2, 0, 0)]
    assert result.max_diff == 0
    assert "2 non-finite where none is expected: [1, 2, 3] is" in str(result)


def test_nonfinite_on_both_sides() -> None:
    special = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    assert compare(special, special, atol=0, rtol=0, max_rel_rmse=0).ok
    assert compare(special.neg(), special, atol=9, rtol=9).bad == 2
    assert compare(torch.ones(4), special, atol=1e9, rtol=1e9).bad == 3


def test_any_dtype_and_no_element(expected: torch.Tensor) -> None:
    assert compare(expected.bfloat16(), expected, atol=0, rtol=2**-8).ok
    assert compare(torch.zeros(0, 3), torch.zeros(0, 3), atol=0, rtol=0, max_rel_rmse=0).ok
    assert compare(torch.tensor(1.0), torch.tensor(2.0), atol=0.5, rtol=0).worst[0].index == ()


def test_blocks_add_up(expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    actual = expected + torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    actual[2, 1] = math.nan
    whole = compare(actual, expected, atol=0.5, rtol=0.01)
    monkeypatch.setattr(import_module("kda.golden.compare"), "BLOCK_ELEMENTS", 7)
    parts = compare(actual, expected, atol=0.5, rtol=0.01)
    assert (parts.bad, parts.nonfinite) == (whole.bad, whole.nonfinite)
    assert [e.index for e in parts.worst] == [e.index for e in whole.worst]
    assert [e.index for e in parts.first_nonfinite] == [e.index for e in whole.first_nonfinite]
    assert parts.rel_rmse == pytest.approx(whole.rel_rmse) and parts.std_diff == pytest.approx(whole.std_diff)


def test_shapes_must_match(expected: torch.Tensor) -> None:
    for form in (lambda a, e: compare(a, e, atol=1, rtol=1), rel_rmse):
        with pytest.raises(ValueError, match=r"actual has shape \[5, 4, 3\], expected has \[3, 4, 5\]"):
            form(expected.reshape(5, 4, 3), expected)


def test_rel_rmse() -> None:
    zeros, ones = torch.zeros(3), torch.ones(3)
    assert rel_rmse(1.5 * ones, ones) == pytest.approx(0.5)
    assert rel_rmse(zeros, zeros) == 0 and rel_rmse(ones, zeros) == math.inf
    assert math.isnan(rel_rmse(ones * math.nan, ones))
