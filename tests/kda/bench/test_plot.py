"""The roofline is drawn of every case that has a time; of none there is no picture."""

from __future__ import annotations

from pathlib import Path

import pytest

import kda
from kda.bench import plot
from kda.bench.cases import CASES
from kda.bench.measure import Ceilings, Measurement
from kda.cli import main

BEST = Ceilings(4e12, 700e12)


def test_cases_with_a_time_are_drawn(tmp_path: Path) -> None:
    file = tmp_path / "bench.png"
    found = [Measurement(CASES[id], "kda", 1e-3) for id in ("H96", "H32", "T64", "B16", "B16x4")]
    found += [Measurement(CASES["H96"], "fla", 2e-3), Measurement(CASES["H32"], "fla", error="no kernel")]
    assert plot.draw(found, BEST, file, "a title") is True
    assert file.read_bytes()[:4] == b"\x89PNG"


def test_nothing_to_draw_is_no_picture(tmp_path: Path) -> None:
    file = tmp_path / "bench.png"
    assert plot.draw([Measurement(CASES["H96"], "kda", error="refused")], BEST, file, "a title") is False
    assert not file.exists()


def test_the_command_says_that_there_was_nothing_to_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusing(**arguments: object) -> None:
        raise NotImplementedError("not today")

    monkeypatch.setattr(kda, "chunk_kda", refusing)
    file = tmp_path / "bench.png"
    assert main(["bench", "--device", "cpu", "--case", "T64", "--plot", str(file)]) == 1
    assert f"--plot: no case has a time to draw; {file} was not written" in capsys.readouterr().out
    assert not file.exists()
