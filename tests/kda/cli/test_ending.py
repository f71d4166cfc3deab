"""How commands end: exit codes, one line on stderr for what user or machine do, and a traceback for a bug alone."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kda.cli.ending import Terminated, exit_code
from kda.cli.options import UsageError

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("KDA_")} | {
    "OMP_NUM_THREADS": "1"
}
# A shell that starts a job in the background has it ignore SIGINT, and so may whatever runs the tests.
LISTENING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
PROGRAM = LISTENING + "import sys; from kda.cli import main; sys.exit(main(sys.argv[1:]))"


def kda(*arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, env=ENVIRONMENT, text=True, **options)


def raising(error: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("--x: expected more"), 2, "kda test: error: --x: expected more\n"),
        (MemoryError(), 2, "kda test: error: out of memory\n"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore"), 2,
         "kda test: error: CUDA out of memory. Tried to allocate 9 GiB.\n"),
        (KeyboardInterrupt(), 130, "kda test: interrupted\n"),
        (Terminated(), 143, "kda test: terminated\n"),
    ],
)  # fmt: skip
def test_one_line_and_a_code(error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("kda test", raising(error)) == code
    assert capsys.readouterr() == ("", message)


def test_what_the_work_returns_is_the_code() -> None:
    assert [exit_code("kda test", lambda code=code: code) for code in (0, 1)] == [0, 1]


@pytest.mark.parametrize("bug", [RuntimeError("shapes"), ValueError("no"), OSError(errno.EBADF, "bad descriptor")])
def test_a_bug_keeps_its_traceback(bug: Exception) -> None:
    with pytest.raises(type(bug)) as raised:
        exit_code("kda test", raising(bug))
    assert raised.value is bug


# ---- signals


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("handler")
def test_sigterm_ends_the_work_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    signal.signal(signal.SIGTERM, mine := lambda number, frame: None)

    def work() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    assert exit_code("kda test", work) == 143 and capsys.readouterr().err == "kda test: terminated\n"
    assert signal.getsignal(signal.SIGTERM) is mine
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as whoever started the process wants it
    assert exit_code("kda test", work) == 0


def test_a_thread_that_cannot_listen_works_all_the_same() -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(exit_code("kda test", lambda: 1)))
    thread.start()
    thread.join()
    assert codes == [1]


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_gate_that_is_ended_shows_and_keeps_what_it_has(number: int, code: int, word: str, tmp_path: Path) -> None:
    file = tmp_path / "gate.json"
    cases = ("L0", "V1", "L2", "L2", "L2")  # L2 takes seconds
    process = kda("gate", "--backend", "torch", "--device", "cpu", "--json", str(file), "--case", *cases,
                  stdout=subprocess.PIPE)  # fmt: skip
    lines = []
    while not lines or not lines[-1].startswith("V1 "):
        lines.append(process.stdout.readline())
        assert lines[-1], process.stderr.read()
    assert [case["id"] for case in json.loads(file.read_text())["cases"]] == ["L0", "V1"]  # while it runs
    process.send_signal(number)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert err == f"kda gate: {word}\n"
    assert "what it holds" in rest and "2 passed, 3 not run" in rest
    report = json.loads(file.read_text())
    assert [case["id"] for case in report["cases"]] == ["L0", "V1"] and report["complete"] is False
    assert os.listdir(tmp_path) == ["gate.json"]


# ---- pipes and devices


def test_a_reader_that_goes_ends_the_command_in_silence() -> None:
    reading, writing = os.pipe()
    process = kda("gate", "--backend", "torch", "--device", "cpu", "--case", "L0", "V1", "TAILS", stdout=writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.readline()
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, "")


@pytest.mark.parametrize("arguments", [("gate", "--list"), ("--help",)])
def test_nobody_reads_from_the_start(arguments: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = kda(*arguments, stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=60)
    assert err == "" and process.returncode in (0, 141)  # argparse does not mind that its help is not read


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said() -> None:
    with open("/dev/full", "w") as full:
        process = kda("gate", "--list", stdout=full)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (2, f"kda gate: error: cannot write: {os.strerror(errno.ENOSPC)}\n")


def test_no_stdout_at_all() -> None:
    command = f"exec {sys.executable} -m kda gate --list >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, env=ENVIRONMENT, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
