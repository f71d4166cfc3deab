"""The gates' picture shows errors as shares of their limits; without any there is no picture, and a word about it."""

from __future__ import annotations

import pytest
import torch

from kda.cli import main
from kda.gates import plot
from kda.gates.case import O_LIMIT, Case, Finding, Result, Run

CASE = Case("X", "", lambda run: None, slow=False)
CPU = torch.device("cpu")


def test_errors_are_shares_of_their_limits():
    run = Run("torch", CPU, torch.float32)
    expected = torch.zeros(1, 3, 2, 4)
    expected[0, 1] = 3.0
    actual = expected.clone()
    actual[0, 0, 1, 2] = O_LIMIT / 2  # of two heads the larger one counts
    actual[0, 1, 0, 0] += O_LIMIT * (1 + 3.0)
    actual[0, 2, 0, 3] = float("nan")
    run.close("o", actual, expected, O_LIMIT, borders=[0])
    error = run.findings[0].error
    assert error.shape == (3, 4)  # tokens, V
    assert error[0, 2].item() == pytest.approx(0.5) and error[1, 0].item() == pytest.approx(1.0, rel=1e-5)
    assert error[2, 3].isnan() and error.nan_to_num().count_nonzero() == 2


@pytest.mark.parametrize("ok", [True, False])
def test_a_picture_is_drawn_of_what_passed_and_what_failed(tmp_path, ok):
    error = torch.rand(200, 8)
    error[7] = float("nan")
    finding = Finding("o", ok, "", error=error, borders=[0, 64, 128])
    file = tmp_path / "gate.png"
    assert plot.draw([Result(CASE, findings=[finding])], file, "a title") is True
    assert file.read_bytes()[:4] == b"\x89PNG"


def test_nothing_to_draw_is_no_picture(tmp_path):
    file = tmp_path / "gate.png"
    without = [Finding("state", True, ""), Finding("o", True, "", error=torch.empty(0, 4))]
    assert plot.draw([Result(CASE, findings=without)], file, "a title") is False
    assert not file.exists()


def test_the_command_says_that_there_was_nothing_to_draw(tmp_path, capsys):
    file = tmp_path / "gate.png"
    arguments = ["gate", "--backend", "torch", "--device", "cpu", "--case", "DETERMINISM", "--plot", str(file)]
    assert main(arguments) == 0
    assert f"--plot: no case left an error of o to draw; {file} was not written" in capsys.readouterr().out
    assert not file.exists()
