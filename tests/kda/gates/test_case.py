"""A gate case: what it looks at, how it ends, and that broken kernels turn the cases red that name the fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from broken_stages import CLAMPED_AT_80, WITHOUT_RIGHT_SHIFT, WITHOUT_TAIL_ZEROS, Broken
from fake_backends import FakeBackend
from torch import Tensor

from kda import backends, golden
from kda.backends.call import ARGUMENTS, KdaCall
from kda.gates.case import Case, Result, Run, Skip, chunk_borders, run_case
from kda.gates.command import CASES
from kda.golden import stages

CPU = torch.device("cpu")
SEED_CASES = {
    "L0", "T1", "P0", "L2", "L3", "U0", "U1", "V0", "V1", "V2", "V3", "V4", "T37", "L2NORM", "DETERMINISM", "NANORDER",
}  # fmt: skip


class GoldenBackend(FakeBackend):
    """A backend made of the golden, with a stage replaced while it runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broken: Broken | None = None) -> None:
        super().__init__()
        self.monkeypatch, self.broken = monkeypatch, broken

    def run(self, call: KdaCall) -> tuple[Tensor, Tensor]:
        o, state = self.broken_run(golden.chunk_kda_golden, call)
        return o.to(call.v.dtype), state.float()

    def stages(self, call: KdaCall) -> dict[str, Tensor]:
        return self.broken_run(golden.chunk_kda_stages, call)

    def broken_run(self, function: Callable[..., Any], call: KdaCall) -> Any:
        with self.monkeypatch.context() as patch:
            if self.broken:
                patch.setattr(stages, *self.broken)
            return function(**{a.name: getattr(call, a.name) for a in ARGUMENTS["chunk_kda"] if not a.written})


@pytest.mark.parametrize(
    ("broken", "red", "green", "named"),
    [
        (WITHOUT_RIGHT_SHIFT, ["L0", "U0", "V2", "T37", "TAILS"], [], "M4 (h"),
        (WITHOUT_TAIL_ZEROS, ["SOFTPLUS", "LOWERBOUND"], ["L0", "U0"], "M1 ("),
        (CLAMPED_AT_80, ["G-1.5", "G-2", "G-5", "G-1000", "GMIX"], ["L0", "V1", "G0"], "M2 (Akk"),
    ],
    ids=["without right shift", "without tail zeros", "clamped at 80"],
)
def test_broken_stage_turns_its_cases_red(monkeypatch, register, broken, red, green, named):
    register("broken", GoldenBackend(monkeypatch, broken))
    for id in red:
        result = run_case(CASES[id], "broken", CPU, torch.bfloat16)
        assert result.outcome == "failed", id
        said = [f.text for f in result.findings if f.what.endswith("stage")]
        assert said and all(named in text for text in said), said
    for id in green:
        assert run_case(CASES[id], "broken", CPU, torch.bfloat16).outcome == "passed", id


def test_golden_backend_itself_is_green(monkeypatch, register):
    """So that red above means the broken stage and not the harness."""
    register("whole", GoldenBackend(monkeypatch))
    for id in ("L0", "SOFTPLUS", "G-5", "GMIX", "V2"):
        assert run_case(CASES[id], "whole", CPU, torch.bfloat16).outcome == "passed", id


def test_broken_golden_turns_long_cases_red(monkeypatch):
    """Long cases are judged by the golden; a fault there can't pass unseen either."""
    monkeypatch.setattr(stages, *WITHOUT_RIGHT_SHIFT)
    assert run_case(CASES["T1"], "torch", CPU, torch.bfloat16).outcome == "passed"  # short: the recurrence judges
    assert run_case(CASES["V4"], "torch", CPU, torch.bfloat16).outcome == "failed"


def test_a_nan_is_found_and_placed(register):
    class Spoiled(FakeBackend):
        def run(self, call: KdaCall) -> tuple[Tensor, Tensor | None]:
            o, state = backends.load("torch").chunk_kda(call)
            o[0, 5, 1, 7] = float("nan")
            return o, state

    register("spoiled", Spoiled())
    result = run_case(CASES["L0"], "spoiled", CPU, torch.bfloat16)
    assert result.outcome == "failed"
    assert "[0, 5, 1, 7] is nan" in result.findings[0].text


def test_a_nan_is_found_where_no_element_has_a_limit_of_its_own():
    run = Run("torch", CPU, torch.float32)
    x = torch.ones(3)
    run.close("x", x, x, float("inf"))
    run.close("x", x, x.index_fill(0, torch.tensor(1), float("nan")), float("inf"))
    run.close("x", x.index_fill(0, torch.tensor(1), float("nan")), x, float("inf"))
    run.close("x", x.index_fill(0, torch.tensor(1), float("inf")), x, float("inf"))
    assert [finding.ok for finding in run.findings] == [True, False, False, False]


def test_the_seed_cases_are_all_there():
    assert set(CASES) >= SEED_CASES
    assert {id for id, case in CASES.items() if case.slow} == {"L3", "PAIRS", "INDEX32"}


def test_outcomes():
    def skip(run: Run) -> None:
        raise Skip("needs a device")

    def refuse(run: Run) -> None:
        raise NotImplementedError("K 64 is not built")

    def crash(run: Run) -> None:
        raise RuntimeError("launch failed")

    def nothing(run: Run) -> None:
        """A case that looks at nothing proves nothing."""

    def outcome(check: Callable[[Run], None]) -> Result:
        return run_case(Case("X", "", check, slow=False), "torch", CPU, torch.float32)

    assert (outcome(skip).outcome, outcome(skip).reason) == ("skipped", "needs a device")
    assert (outcome(refuse).outcome, outcome(refuse).reason) == ("refused", "K 64 is not built")
    assert (outcome(crash).outcome, outcome(crash).reason) == ("failed", "RuntimeError: launch failed")
    assert outcome(nothing).outcome == "failed"


def test_plot_marks_where_chunks_begin():
    inputs = Run("torch", CPU, torch.float32).stable(1, 200, 1, lengths=[70, 0, 100])
    assert chunk_borders(inputs) == [0, 64, 70, 134]


def test_same_bits_sees_one_flipped_bit_and_lets_nan_equal_itself():
    run = Run("torch", CPU, torch.float32)
    x = torch.tensor([1.0, float("nan"), -0.0])
    run.same_bits("x", x.clone(), x)
    run.same_bits("zero's sign", x.abs(), x)
    assert [finding.ok for finding in run.findings] == [True, False]
