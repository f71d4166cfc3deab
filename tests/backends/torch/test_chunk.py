"""The torch backend's chunk_kda: exact at every gate, size and flag, and its stages are the golden's."""

from __future__ import annotations

import pytest
import torch
from torch_calls import FP32_LIMIT, GATES, LENGTHS, assert_matches_recurrence

from kda import golden
from kda.backends.torch.chunk import stages
from kda.checks import checked
from kda.golden import inputs, rel_rmse

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("gate", GATES)
def test_is_exact_at_every_gate(gate: str | float) -> None:
    assert_matches_recurrence(inputs.stable(2, 200, 2, 64, 32, gate=gate, dtype=torch.float32, initial_state=True))


@pytest.mark.parametrize("T", [1, 2, 15, 17, 63, 64, 65, 127, 129, 500])
def test_tails(T: int) -> None:
    assert_matches_recurrence(inputs.stable(1, T, 1, 32, dtype=torch.float32, initial_state=True))


@pytest.mark.parametrize("state_v_first", [True, False])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_flags_gva_and_state_layouts(lower_bound: float | None, state_v_first: bool) -> None:
    call = inputs.raw(
        1, 400, 2, 32, 48, 6, lengths=LENGTHS, lower_bound=lower_bound, allow_neg_eigval=lower_bound is not None,
        initial_state=True, dtype=torch.float32, state_v_first=state_v_first,
    )  # fmt: skip
    assert_matches_recurrence(call)


@pytest.mark.parametrize("K, V", [(1, 1), (3, 5), (256, 64)])
def test_takes_any_head_size(K: int, V: int) -> None:
    assert_matches_recurrence(inputs.stable(1, 70, 2, K, V, dtype=torch.float32, initial_state=True))


@pytest.mark.parametrize(
    "dtype, limit", [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float16, 5e-4)]
)
def test_dtypes(dtype: torch.dtype, limit: float) -> None:
    call = inputs.stable(1, 200, 2, 64, dtype=dtype)
    assert_matches_recurrence(call, limit)
    assert_matches_recurrence(call | {"g": call["g"].to(dtype), "beta": call["beta"].to(dtype)}, limit)


def test_scale() -> None:
    call = inputs.stable(1, 100, 1, 32, dtype=torch.float32)
    assert_matches_recurrence(call | {"scale": 0.5})


def test_more_heads_than_are_worked_on_at_a_time() -> None:
    assert_matches_recurrence(inputs.stable(1, 70, 45, 8, HV=90, dtype=torch.float32, initial_state=True))


def test_nearly_equal_keys_without_decay() -> None:
    assert_matches_recurrence(inputs.collinear(1, 600, 2, 64, dtype=torch.float32))


def test_cancellation_in_the_corrected_values() -> None:
    assert_matches_recurrence(inputs.cancellation_stress(1, 128, 1, 32, dtype=torch.float32))


def test_saturated_beta_with_negative_eigenvalues() -> None:
    call = inputs.raw(1, 200, 1, 32, dtype=torch.float32, allow_neg_eigval=True)
    assert_matches_recurrence(call | {"beta": call["beta"] + 20.0})


@pytest.mark.parametrize("gate", ["logsigmoid", "half_1000"])
def test_stages_are_the_goldens(gate: str) -> None:
    call = inputs.stable(1, 400, 2, 32, 16, 4, lengths=LENGTHS, gate=gate, dtype=torch.float32, initial_state=True)
    tables = stages(checked("chunk_kda", **call))
    expected = golden.chunk_kda_stages(**call)
    assert set(tables) == {name for names in golden.STAGES.values() for name in names} == set(expected)
    for name, x in tables.items():
        assert x.shape == expected[name].shape and rel_rmse(x, expected[name]) <= FP32_LIMIT, name
