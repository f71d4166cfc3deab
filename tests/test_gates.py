"""The gates: the default table passes on torch, and broken kernels turn the cases red that name the fault."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kda import backends, golden
from kda.__main__ import main
from kda.backends.call import KdaCall
from kda.gates import command
from kda.gates.case import CASES, Case, Result, Run, Skip, chunk_borders, run_case
from kda.golden import stages
from kda.operator import CHUNK_ARGUMENTS

SEED_CASES = {
    "L0", "T1", "P0", "L2", "L3", "U0", "U1", "V0", "V1", "V2", "V3", "V4", "T37", "L2NORM", "DETERMINISM", "NANORDER",
}  # fmt: skip


class GoldenBackend:
    """A backend made of the golden with one stage replaced."""

    differentiable = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stage: str, replacement: Callable) -> None:
        self._monkeypatch, self._stage, self._replacement = monkeypatch, stage, replacement

    def unusable(self) -> list[str]:
        return []

    def refuses(self, call: KdaCall) -> list[str]:
        return []

    def chunk_kda(self, call: KdaCall) -> tuple[Tensor, Tensor]:
        o, state = self._run(golden.chunk_kda_golden, call)
        return o.to(call.v.dtype), state.float()

    def stages(self, call: KdaCall) -> dict[str, Tensor]:
        return self._run(golden.chunk_kda_stages, call)

    def _run(self, function: Callable, call: KdaCall):
        with self._monkeypatch.context() as patch:
            patch.setattr(stages, self._stage, self._replacement)
            return function(**{name: getattr(call, name) for name in CHUNK_ARGUMENTS if name != "backend"})


def m4_without_right_shift(Aqk, qg, kg, decay, w, u, initial_state):
    """The output reads the state that its own chunk has already updated."""
    good = _m4(Aqk, qg, kg, decay, w, u, initial_state)
    after = torch.cat([good.h[1:], good.final_state[None]])
    return good._replace(o=qg @ after + Aqk @ good.v_new, h=after)


def m1_without_tail_mask(q, k, g, beta, act, valid=None):
    """Rows past a sequence's end are taken for tokens."""
    return _m1(q, k, g, beta, act, None)


def m2_with_capped_pivot(q, k, beta, G):
    """One pivot for 64 rows, and an exponent cut at 80: wrong as soon as 64 tokens decay by more."""
    rows = torch.arange(G.shape[-2])
    pivot = G[..., rows // 64 * 64, :]
    queries = (G - pivot).exp().to(k.dtype)
    keys = k * (pivot - G).clamp(max=80.0).exp().to(k.dtype)
    Aqk = ((q * queries) @ keys.mT).tril()
    Akk = ((k * queries) @ keys.mT).tril(-1) * beta.unsqueeze(-1)
    eye = torch.eye(len(rows), dtype=k.dtype)
    return stages.M2(Akk, Aqk, torch.linalg.inv(eye + Akk))


_m1, _m4 = stages.m1, stages.m4


@pytest.mark.parametrize(
    ("stage", "broken", "red", "green", "named"),
    [
        ("m4", m4_without_right_shift, ["L0", "U0", "V2", "T37", "TAILS"], [], "M4 (h"),
        ("m1", m1_without_tail_mask, ["SOFTPLUS", "LOWERBOUND"], ["L0", "U0"], "M1 ("),
        ("m2", m2_with_capped_pivot, ["G-1.5", "G-2", "G-5", "G-1000", "GMIX"], ["L0", "V1", "G0"], "M2 (Akk"),
    ],
)
def test_broken_stage_turns_its_cases_red(monkeypatch, stage, broken, red, green, named):
    backend = GoldenBackend(monkeypatch, stage, broken)
    monkeypatch.setattr(backends, "load", lambda name: backend)
    for id in red:
        result = run_case(CASES[id], "torch", "cpu", torch.bfloat16)
        assert result.outcome == "failed", id
        said = [f.text for f in result.findings if f.what.endswith("stage")]
        assert said and all(named in text for text in said), said
    for id in green:
        assert run_case(CASES[id], "torch", "cpu", torch.bfloat16).outcome == "passed", id


def test_golden_backend_itself_is_green(monkeypatch):
    """So that red above means the broken stage and not the harness."""
    backend = GoldenBackend(monkeypatch, "m1", stages.m1)
    monkeypatch.setattr(backends, "load", lambda name: backend)
    for id in ("L0", "SOFTPLUS", "G-5", "GMIX", "V2"):
        assert run_case(CASES[id], "torch", "cpu", torch.bfloat16).outcome == "passed", id


def test_broken_golden_turns_long_cases_red(monkeypatch):
    """Long cases are judged by the golden; a fault there can't pass unseen either."""
    monkeypatch.setattr(stages, "m4", m4_without_right_shift)
    assert run_case(CASES["T1"], "torch", "cpu", torch.bfloat16).outcome == "passed"  # short: the recurrence judges
    assert run_case(CASES["V4"], "torch", "cpu", torch.bfloat16).outcome == "failed"


def test_a_nan_is_found_and_placed(monkeypatch):
    torch_backend = backends.load("torch")

    def spoiled(call):
        o, state = torch_backend.chunk_kda(call)
        o[0, 5, 1, 7] = float("nan")
        return o, state

    backend = GoldenBackend(monkeypatch, "m1", stages.m1)
    backend.chunk_kda = spoiled
    monkeypatch.setattr(backends, "load", lambda name: backend)
    result = run_case(CASES["L0"], "torch", "cpu", torch.bfloat16)
    assert result.outcome == "failed"
    assert "[0, 5, 1, 7] is nan" in result.findings[0].text


def test_default_table_passes_on_torch(tmp_path, capsys):
    out, picture = tmp_path / "gate.json", tmp_path / "gate.png"
    code = main(["gate", "--backend", "torch", "--device", "cpu", "--json", str(out), "--plot", str(picture)])
    shown = capsys.readouterr().out
    assert code == 0, shown
    report = json.loads(out.read_text())
    ran = {c["id"]: c["outcome"] for c in report["cases"]}
    assert {id for id, case in CASES.items() if not case.slow} == set(ran)
    assert {id for id, outcome in ran.items() if outcome != "passed"} == {"GRAPH"}
    assert picture.read_bytes()[:4] == b"\x89PNG"


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
        return run_case(Case("X", "", check, slow=False), "torch", "cpu", torch.float32)

    assert (outcome(skip).outcome, outcome(skip).reason) == ("skipped", "needs a device")
    assert (outcome(refuse).outcome, outcome(refuse).reason) == ("refused", "K 64 is not built")
    assert (outcome(crash).outcome, outcome(crash).reason) == ("failed", "RuntimeError: launch failed")
    assert outcome(nothing).outcome == "failed"


def test_plot_marks_where_chunks_begin():
    inputs = Run("torch", "cpu", torch.float32).stable(1, 200, 1, lengths=[70, 0, 100])
    assert chunk_borders(inputs) == [0, 64, 70, 134]


def test_same_bits_sees_one_flipped_bit_and_lets_nan_equal_itself():
    run = Run("torch", "cpu", torch.float32)
    x = torch.tensor([1.0, float("nan"), -0.0])
    run.same_bits("x", x.clone(), x)
    run.same_bits("zero's sign", x.abs(), x)
    assert [finding.ok for finding in run.findings] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--case", "NOPE"], 2, "--case: unknown NOPE; known: L0"),
        (["--backend", "nope"], 2, "--backend: expected one of auto, tilelang, pypto, torch, got 'nope'"),
        (["--plot", "x.pdf", "--case", "L0"], 2, "--plot: expected a name that ends in .png"),
        (["--list"], 0, "near-identical keys"),
        (["--case", "L0", "--backend", "torch", "--dtype", "fp32"], 0, "1 passed"),
    ],
)
def test_command_line(arguments, code, message):
    done = subprocess.run([sys.executable, "-m", "kda", "gate", *arguments], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert message in done.stdout
    assert "\x1b" not in done.stdout  # no colours and no bar in a pipe


def test_a_failure_exits_with_1_and_says_why(monkeypatch, capsys):
    monkeypatch.setattr(stages, "m4", m4_without_right_shift)
    assert main(["gate", "--backend", "torch", "--device", "cpu", "--case", "V4"]) == 1
    shown = capsys.readouterr().out
    assert "V4, o: FAILED" in shown and "worst at" in shown and "1 failed" in shown


def test_plot_needs_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "needs matplotlib" in command.plot_problem(command.Path("x.png"))
