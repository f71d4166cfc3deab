"""`python -m kda bench --model`, with a backend whose model is made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_backends import FakeBackend

from kda.backends.call import KdaCall
from kda.backends.pypto.cost_model import CORES, HERTZ, Counts, Model
from kda.cli import main

pytestmark = pytest.mark.usefixtures("one_thread", "plain_environment")

STAGES = {
    "M2 scores": Counts(matmuls=8, products_32=1024 * CORES * 9, read=4096, written=1024),
    "M4 carry": Counts(matmuls=4, products_16=4096 * CORES, vector_ops=2, copies=6, read=1024),
}


def made_up(call: KdaCall) -> Model:
    if call.op == "fused_recurrent_kda":
        raise RuntimeError("the scheduler [ended]")
    return Model(cycles=1_800_000, tasks=44, units=call.HV * call.T // 128, workspace=10**8, stages=STAGES)


@pytest.fixture
def fake(register) -> FakeBackend:
    backend = register("fake", FakeBackend())
    backend.model = made_up
    return backend


@pytest.mark.usefixtures("fake")
def test_tables_report_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, picture = tmp_path / "model.json", tmp_path / "model.png"
    arguments = ["--case", "H1-T512", "T128", "--json", str(report), "--plot", str(picture)]
    assert main(["bench", "--backend", "fake", "--model", *arguments]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "H1-T512 1 512 1.800 1.000 11.0 100 0.000 0.000" in lines
    assert "H1-T512 M4 carry 1.0 0.0 0.0 0.5 1.5 0.2 0.0" in lines
    assert "H1-T512 all 3.0 0.0 0.1 0.5 1.5 1.2 0.2" in lines
    assert any("no NPU takes" in line for line in lines) and picture.stat().st_size > 1000
    found = json.loads(report.read_text())
    assert found["complete"] and [model["case"] for model in found["models"]] == ["H1-T512", "T128"]
    assert found["models"][0]["cube_seconds"] == 10 / HERTZ
    assert found["models"][1]["stages"]["M2 scores"]["products_32"] == 1024 * CORES * 9


@pytest.mark.usefixtures("fake")
def test_a_case_that_fails_is_told_and_costs_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "model.json"
    assert main(["bench", "--backend", "fake", "--model", "--case", "B1", "T64", "--json", str(report)]) == 1
    out = capsys.readouterr().out
    assert "B1: the scheduler [ended]" in out and "T64" in out
    assert json.loads(report.read_text())["errors"] == {"B1": "the scheduler [ended]"}


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--backend", "torch"], "--model: backend torch has no performance model"),
        (["--backend", "pypto", "--case", "H7"], "--case: unknown H7; known with --model: H1-T512"),
        (["--backend", "pypto", "--case", "train-H32"], "--case: unknown train-H32"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--model", *arguments]) == 2
    assert said in capsys.readouterr().err
