"""`python -m kda gate`: the default table passes on torch; its exit codes, messages and report."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from broken_stages import WITHOUT_RIGHT_SHIFT

from kda.cli import main
from kda.gates.command import CASES
from kda.golden import stages


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
