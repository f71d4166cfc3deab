"""`python -m kda.golden` passes, and sees each stage that is broken on purpose."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from broken_stages import WITHOUT_BETA, WITHOUT_INVERSE, WITHOUT_RIGHT_SHIFT, WITHOUT_TAIL_ZEROS, Broken

from kda.golden import __main__, stages
from kda.golden.backward import stages as backward_stages


@pytest.mark.parametrize(
    ("broken", "red"),
    [
        (WITHOUT_RIGHT_SHIFT, "fixed length, float32, o"),
        (WITHOUT_TAIL_ZEROS, "varlen, sequence of 37, final state"),
        (WITHOUT_BETA, "fixed length, bfloat16, o"),
        (WITHOUT_INVERSE, "varlen, sequence of 130, final state"),
    ],
)
def test_self_check_sees_a_broken_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: Broken, red: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["kda.golden"])
    monkeypatch.setattr(stages, *broken)
    assert __main__.main() == 1
    assert f"{red}: FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stage", "tensor", "red"),
    [
        ("carry_backward", "dh", "gradient of g"),
        ("wy_backward", "dAqk", "gradient of q"),
        ("scores_backward", "dbeta_activated", "gradient of beta"),
        ("activate_backward", "dA_log", "gradient of A_log"),
    ],
)
def test_self_check_sees_a_broken_gradient(monkeypatch: pytest.MonkeyPatch, stage: str, tensor: str, red: str) -> None:
    good = getattr(backward_stages, stage)

    def broken(*args: Any, **kwargs: Any) -> Any:
        gradients = good(*args, **kwargs)
        return gradients._replace(**{tensor: torch.zeros_like(getattr(gradients, tensor))})

    monkeypatch.setattr(backward_stages, stage, broken)
    checks = __main__.gradient_check()
    assert len(checks) == 8 and not checks[red].ok


def test_module_runs_and_reports() -> None:
    done = subprocess.run([sys.executable, "-m", "kda.golden"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": ok: ") == 2 * (3 + len(__main__.LENGTHS)) + 8
