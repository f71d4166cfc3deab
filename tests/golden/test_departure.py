"""The first stage that departs: stages in their order, tensors that both tables have, NaN and limits."""

from __future__ import annotations

import math

import torch

from kda.golden import BACKWARD_STAGES, STAGES, first_departure

NAMES = [name for names in (*STAGES.values(), *BACKWARD_STAGES.values()) for name in names]


def test_the_first_stage_in_the_order_of_the_passes_is_named() -> None:
    assert len(set(NAMES)) == len(NAMES), "one table can hold the tensors of both passes"
    good = {name: torch.ones(3) for name in reversed(NAMES)}
    assert first_departure(good, good, 0.0) is None
    broken = good | {name: 1.5 * good[name] for name in ("dh", "dq", "v_new", "dAqk")}
    assert first_departure(broken, good, 1e-3) == "M4 (v_new, relative RMSE 5.00e-01)"
    assert first_departure(broken | {"v_new": good["v_new"]}, good, 1e-3) == "dM4 (dh, relative RMSE 5.00e-01)"
    assert first_departure(broken, good, 0.6) is None


def test_what_one_table_lacks_is_passed_over_and_nan_departs() -> None:
    expected = {"dv_new": torch.ones(3), "dq": torch.ones(3), "o": torch.ones(3)}
    actual = {"h": torch.zeros(2), "dq": torch.tensor([1.0, math.nan, 1.0]), "o": torch.zeros(3)}
    assert first_departure(actual, expected, 1e-3) == "dM1 (dq, relative RMSE nan)"
