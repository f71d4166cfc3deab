"""`python -m kda`: its commands, exit codes, and where a complaint is printed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kda
from kda.cli import COMMANDS, main


@pytest.mark.parametrize("arguments", [[], ["nosuch"], ["info", "extra"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: kda" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["demo", "gate", "ladder", "bench"])
def test_what_a_command_cannot_do_is_said_on_stderr(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, *(["--json", "nowhere/x.json"] if command != "demo" else ["nowhere/x.txt"])]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"kda {command}: error: ") and "nowhere" in err and err.count("\n") == 1 and not out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"kda {kda.__version__}\n"


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert set(COMMANDS) == {"info", "demo", "gate", "ladder", "bench"} and all(name in out for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0 and f"usage: kda {command}" in capsys.readouterr().out


def test_importing_kda_stays_light() -> None:
    code = "import sys, kda.nn; print(*(m for m in ('tilelang', 'pypto', 'rich', 'kda.gates') if m in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == ""
