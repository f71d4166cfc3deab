"""The kernels in PyPTO's cost model: its scheduler survives them, and what was compiled has the expected counts."""

from __future__ import annotations

import pytest
import torch

from kda.backends.call import KdaCall
from kda.backends.pypto import cost_model
from kda.backends.pypto.config import DEPTH, SMALL_DEPTH, config
from kda.backends.pypto.detect import missing_pypto
from kda.bench.cases import Case, Decode
from kda.checks import checked


@pytest.fixture(autouse=True)
def compiler() -> None:
    if reason := missing_pypto():
        pytest.skip(reason)


def call_of(H: int, *lengths: int, decode: bool = False, **changed: float | None) -> KdaCall:
    case = (Decode if decode else Case)("", H, lengths)
    op = "fused_recurrent_kda" if decode else "chunk_kda"
    return checked(op, **case.inputs(torch.device("cpu"), torch.bfloat16) | changed)


def model_of(H: int, *lengths: int, decode: bool = False, **changed: float | None) -> cost_model.Model:
    return cost_model.model(call_of(H, *lengths, decode=decode, **changed))


FULL = 128**3
INVERSE = 4 * 32**3 + 2 * 64**3
"""Multiplications in a product of full tiles, and in the products that join the inverse's blocks of 32 rows."""


def check_counts(model: cost_model.Model, bounded: bool = True) -> None:
    """What one chunk of a head takes, all products in fp32, and the traffic of today at most."""
    total, units = model.total, model.units
    # Bounded: a product for each block of 16 rows; else the sums of the gates, and two products a level and one more.
    scores, products = (8, 32 * 128 * 16 * 36) if bounded else (9 + 15, (9 + 15) * FULL)
    assert (total.matmuls, total.products_16) == ((scores + 6 + 6) * units, 0)
    assert total.products_32 == (products + INVERSE + 6 * FULL) * units
    assert 0 < total.read + total.written <= (4.3e6 if bounded else 11.8e6) * units
    assert sum(counts.matmuls for counts in model.stages.values()) == total.matmuls
    by_stage = {name for name, counts in model.stages.items() if counts.matmuls}
    assert by_stage - {"M1 cumsum"} == {"M2 scores", "M2 inverse", "M3 wy", "M4 carry"}


def test_few_heads() -> None:
    model = model_of(1, 300)
    assert model.units == 3 and model.cycles > 0 and model.workspace < 0.5e9
    check_counts(model)


@pytest.mark.slow
def test_gates_without_a_lower_bound() -> None:
    model = model_of(1, 128, lower_bound=None)
    assert model.units == 1 and model.workspace < 0.5e9
    check_counts(model, bounded=False)


def test_the_scheduler_survives_more_iterations_than_it_holds_at_once() -> None:
    """512 chunks of 32 heads, whose 256 iterations ended PyPTO's scheduler with a depth of more than 128."""
    model = model_of(32, 2048)
    assert model.units == 512 and model.workspace < 1.83e9
    check_counts(model)
    assert model.tasks < 30 * model.units


def test_the_scheduler_survives_decoding() -> None:
    model = model_of(32, *[1] * 16, decode=True)
    assert model.units == 512 and model.total.matmuls == 0 and model.workspace < 30e6
    assert model.total.read + model.total.written <= 220e3 * model.units
    assert model.tasks == model.units, "the state is read, changed and written by one task"


@pytest.mark.slow
def test_a_small_call_takes_little_workspace() -> None:
    assert model_of(8, 128).workspace < 0.5e9


@pytest.mark.parametrize(
    "H, lengths, depth",
    [
        (1, (512,), SMALL_DEPTH),
        (8, (4096,), SMALL_DEPTH),
        (1, (500,) * 8, SMALL_DEPTH),
        (8, (4097,), DEPTH),
        (9, (64,), DEPTH),
        (1, (32_768,), DEPTH),
    ],
)
def test_depth_is_chosen_by_the_call(H: int, lengths: tuple[int, ...], depth: int) -> None:
    assert config(call_of(H, *lengths)).depth == depth and max(DEPTH, SMALL_DEPTH) <= 128


def test_a_process_that_ends_is_an_error_that_says_how(monkeypatch, tmp_path) -> None:
    python = tmp_path / "python"
    monkeypatch.setattr(cost_model.sys, "executable", str(python))
    for command, said in (
        ("kill -SEGV $$", "PyPTO's scheduler ended with SIGSEGV"),
        ("echo why; exit 3", "failed: why"),
    ):
        python.write_text(f"#!/bin/sh\n{command}\n")
        python.chmod(0o755)
        with pytest.raises(RuntimeError, match=said):
            cost_model.model(call_of(1, 8))
