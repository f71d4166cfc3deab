"""`python -m kda gate --report`: one file with all that an issue needs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_backends import FakeBackend

from kda.bench.measure import Measurement
from kda.cli import main
from kda.gates import report

pytestmark = pytest.mark.usefixtures("one_thread", "plain_environment")


def test_on_a_cpu_it_has_versions_and_gates(tmp_path: Path) -> None:
    file = tmp_path / "report.txt"
    arguments = ["gate", "--backend", "torch", "--device", "cpu", "--case", "L0", "T37"]
    assert main([*arguments, "--report", str(file)]) == 0
    lines = [" ".join(line.split()) for line in file.read_text().splitlines()]
    assert f"torch {torch.__version__}" in lines and "2 passed in" in "".join(lines)
    assert any(line.startswith("T37 ") and "passed" in line for line in lines)
    assert "Nothing is timed on a CPU." in lines


def test_on_a_device_times_stand_beside_the_models(tmp_path: Path, register, monkeypatch: pytest.MonkeyPatch) -> None:
    def model(call):
        if call.HV == 1:
            raise RuntimeError("it ended")
        return SimpleNamespace(seconds=2e-3)

    def measure(case, *_, **__) -> Measurement:
        return Measurement(case, "kda", **({"error": "no memory"} if case.id == "B16" else {"seconds": 1e-3}))

    register("fake", FakeBackend()).model = model
    monkeypatch.setattr(report, "measure", measure)
    monkeypatch.setattr(report.model.Case, "inputs", on_the_cpu(report.model.Case.inputs))
    file = tmp_path / "report.txt"
    report.write(
        file, lambda console: console.print("as they are"), "fake", torch.device("meta"), "bf16", torch.bfloat16
    )
    lines = [" ".join(line.split()) for line in file.read_text().splitlines()]
    assert "as they are" in lines and "H8-T1024 8 1024 1.000 2.000" in lines
    assert "H1-T512 1 512 1.000 model: it ended" in lines and "B16 32 16 2.000 no memory" in lines


def on_the_cpu(inputs):
    """A case's inputs there, whatever the device."""
    return lambda case, device, dtype: inputs(case, torch.device("cpu"), dtype)


def test_a_file_that_cannot_be_written_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "--report", str(tmp_path / "nowhere" / "report.txt")]) == 2
    assert "--report: expected a file in a folder that exists" in capsys.readouterr().err
