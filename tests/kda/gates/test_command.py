"""`python -m kda gate`: the default table passes on torch; its exit codes, messages and report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from broken_stages import WITHOUT_RIGHT_SHIFT
from fake_backends import FakeBackend
from torch import Tensor

from kda import backends
from kda.backends.call import KdaCall
from kda.cli import main
from kda.gates.case import Case, Result, Run
from kda.gates.command import CASES
from kda.golden import stages


def test_the_table_passes_on_torch(tmp_path, capsys):
    """But for L2, which on a CPU takes as long as all the others together."""
    out, picture = tmp_path / "gate.json", tmp_path / "gate.png"
    cases = [id for id, case in CASES.items() if not case.slow and id != "L2"]
    files = ["--json", str(out), "--plot", str(picture)]
    code = main(["gate", "--backend", "torch", "--device", "cpu", *files, "--case", *cases])
    shown = capsys.readouterr().out
    assert code == 0, shown
    report = json.loads(out.read_text())
    assert report["complete"] is True
    ran = {c["id"]: c["outcome"] for c in report["cases"]}
    assert set(cases) == set(ran)
    assert {id for id, outcome in ran.items() if outcome != "passed"} == {"GRAPH"}
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_the_default_table_passes_on_torch(tmp_path):
    out = tmp_path / "gate.json"
    assert main(["gate", "--backend", "torch", "--device", "cpu", "--json", str(out)]) == 0
    ran = {case["id"] for case in json.loads(out.read_text())["cases"]}
    assert ran == {id for id, case in CASES.items() if not case.slow}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--case", "NOPE"], 2, "kda gate: error: --case: unknown NOPE; known: L0"),
        (["--backend", "nope"], 2, "--backend: expected one of auto, tilelang, pypto, torch, got 'nope'"),
        (["--plot", "x.pdf", "--case", "L0"], 2, "--plot: expected a name that ends in .png"),
        (["--list"], 0, "near-identical keys"),
        (["--case", "L0", "--backend", "torch", "--dtype", "fp32"], 0, "1 passed"),
    ],
)
def test_command_line(arguments, code, message):
    done = subprocess.run([sys.executable, "-m", "kda", "gate", *arguments], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert message in (done.stderr if code else done.stdout)
    assert not (done.stdout if code else done.stderr)
    assert "\x1b" not in done.stdout  # no colours and no bar in a pipe


def test_a_failure_exits_with_1_and_says_why(monkeypatch, capsys):
    monkeypatch.setattr(stages, *WITHOUT_RIGHT_SHIFT)
    assert main(["gate", "--backend", "torch", "--device", "cpu", "--case", "V4"]) == 1
    shown = capsys.readouterr().out
    assert "V4, o: FAILED" in shown and "worst at" in shown and "1 failed" in shown


class Torch(FakeBackend):
    """The torch backend, with a thing that happens at one of its calls."""

    def __init__(self, at: int | None = None, error: BaseException | None = None) -> None:
        super().__init__()
        self.at, self.error = at, error

    def run(self, call: KdaCall) -> tuple[Tensor, Tensor | None]:
        if len(self.calls) == self.at:
            raise self.error
        return getattr(backends.load("torch"), call.op)(call)


GATE = ["gate", "--backend", "fake", "--device", "cpu", "--case", "L0", "V1", "V2"]


def test_without_a_terminal_every_case_has_its_line_as_it_ends(register, capsys):
    register("fake", Torch())
    assert main(GATE) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"[\d.]+ s$", "… s", line) for line in lines[1:4]] == [
        "L0 passed … s", "V1 passed … s", "V2 passed … s",
    ]  # fmt: skip
    assert lines[-1].startswith("3 passed in ")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemError("a bug")])
def test_a_run_that_is_ended_keeps_what_it_has(error, register, monkeypatch, tmp_path, capsys):
    """By Ctrl-C, or by a bug of the command itself: that keeps its traceback as well."""
    file = tmp_path / "gate.json"
    register("fake", Torch(at=2, error=error))
    if isinstance(error, KeyboardInterrupt):
        assert main([*GATE, "--json", str(file)]) == 130
    else:
        monkeypatch.setattr("kda.gates.command.run_case", run_case_without_net)
        with pytest.raises(SystemError):
            main([*GATE, "--json", str(file)])
    out, err = capsys.readouterr()
    assert "what it holds" in out and "1 passed, 2 not run" in out
    assert err == ("kda gate: interrupted\n" if isinstance(error, KeyboardInterrupt) else "")
    report = json.loads(file.read_text())
    assert report["complete"] is False and [case["id"] for case in report["cases"]] == ["L0"]


def run_case_without_net(case: Case, backend: str, device: torch.device, dtype: torch.dtype) -> Result:
    run = Run(backend, device, dtype)
    case.check(run)
    return Result(case, findings=run.findings)


def test_a_backend_that_can_builds_ahead_of_the_cases(register, capsys):
    """It is given the calls before the first case runs, and waited for at the end of a run that is not ended early."""
    happened: list[object] = []

    class Building(Torch):
        def build_ahead(self, calls: list[KdaCall]) -> Callable[[], None]:
            happened.append([(call.op, call.B, call.T, call.N) for call in calls])
            return lambda: happened.append("waited")

        def run(self, call: KdaCall) -> tuple[Tensor, Tensor | None]:
            happened.append("ran")
            return super().run(call)

    register("fake", Building())
    assert main([*GATE[:-3], "L0", "V2"]) == 0
    assert happened == [[("chunk_kda", 1, 128, 1), ("chunk_kda", 1, 512, 3)], "ran", "ran", "waited"]
    register("fake", ended := Building(at=1, error=KeyboardInterrupt()))
    del happened[:]
    assert main([*GATE[:-3], "L0", "V2"]) == 130 and happened[1:] == ["ran"] and len(ended.calls) == 1
