"""`python -m kda demo`: what it prints, that it notices a broken operator, and what it refuses."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_backends import FakeBackend

import kda.nn
from kda.cli import demo, main

SHORT = ["--prefill", "100", "--decode", "8", "--device", "cpu"]

pytestmark = pytest.mark.usefixtures("one_thread", "plain_environment")


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / ("long" * 15) / "text.txt"
    path.parent.mkdir()
    path.write_bytes("Größe: the quick brown fox jumps over the lazy dog.\n".encode() * 4)
    return path


def test_demo_reads_a_file_and_agrees(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", str(text_file), *SHORT]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert text_file.name in "".join(out.split())
    assert "OK: all 5 comparisons agree" in out and out.count(" ok") == 5 and "FAILED" not in out
    assert "torch, which auto takes for cpu tensors" in out


def test_demo_default_text_is_long_enough_for_the_default_sizes() -> None:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    args = parser.parse_args([])
    assert len(demo.read_text(demo.default_text(), args.prefill, args.decode)) == args.prefill + args.decode


@pytest.mark.parametrize(("encoding", "width"), [("utf-8", 120), ("ascii", 60)])
def test_demo_piped_is_plain_and_as_wide_as_asked(encoding: str, width: int, text_file: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": encoding}
    if width != 120:  # what a pipe has by default
        environment["COLUMNS"] = str(width)
    result = subprocess.run(
        [sys.executable, "-m", "kda", "demo", str(text_file), *SHORT], capture_output=True, env=environment, timeout=120
    )
    out = result.stdout.decode(encoding)
    assert result.returncode == 0, result.stderr.decode()
    assert "\x1b" not in out and "\r" not in out
    assert max(map(len, out.splitlines())) <= width


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_demo_agrees_in_half_precision(text_file: Path, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", str(text_file), *SHORT, "--dtype", dtype]) == 0
    assert "within a relative RMSE of 0.005" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("broken", "tampered", "bad"),
    [
        ("fused_recurrent_kda", lambda o, state: (o, state * 1.001), 3),
        ("fused_recurrent_kda", lambda o, state: (o * 1.001, state), 2),
        ("chunk_kda", lambda o, state: (o.flip(1), state), 3),
        ("chunk_kda", lambda o, state: (o, state * float("nan")), 4),
    ],
    ids=["decode_state", "decode_output", "chunk_output", "chunk_state_nan"],
)
def test_demo_notices_a_broken_operator(
    broken: str, tampered: object, bad: int, text_file: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    op = getattr(kda.nn, broken)
    monkeypatch.setattr(kda.nn, broken, lambda **inputs: tampered(*op(**inputs)))
    assert main(["demo", str(text_file), *SHORT]) == 1
    out = capsys.readouterr().out
    assert f"FAILED: {bad} of 5 comparisons exceed" in out
    assert out.count("FAILED") == bad + 1


def test_demo_says_what_is_wrong_with_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing, empty, short = tmp_path / "missing.txt", tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.touch()
    short.write_text("too short")
    for path, message in (
        (missing, "No such file or directory"),
        (tmp_path, "Is a directory"),
        (empty, "has 0 bytes, but 108 are needed (100 to prefill and 8 to decode)"),
        (short, "has 9 bytes, but 108 are needed"),
    ):
        assert main(["demo", str(path), *SHORT]) == 2
        out, err = capsys.readouterr()
        assert err.startswith("kda demo: error: ") and message in err and str(path) in err and not out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill", "0"], "argument --prefill: expected at least 1, got 0"),
        (["--decode", "many"], "argument --decode: invalid positive_int value: 'many'"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
    ],
)
def test_demo_refuses_bad_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("file", [[], ["/dev/zero"]])
def test_demo_refuses_more_text_than_the_memory_holds(file: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *file, "--device", "cpu", "--prefill", "99999999999"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("kda demo: error: needs about 6,103,516 GiB of free memory on cpu, has ")
    assert err.endswith(": lower --prefill and --decode\n") and err.count("\n") == 1 and not out


def test_demo_reads_what_has_no_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "/dev/zero", *SHORT]) == 0
    assert "100 to prefill and 8 to decode\n" in re.sub(" +\n", "\n", capsys.readouterr().out)


def test_demo_without_pythons_own_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Some distributions leave pydoc_data out, package and all."""
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    monkeypatch.delitem(sys.modules, "pydoc_data.topics", raising=False)
    assert main(["demo", *SHORT]) == 2
    assert capsys.readouterr().err == "kda demo: error: this Python ships without pydoc_data/topics.py: name a FILE\n"


def test_demo_that_is_ended_shows_the_passes_so_far(
    text_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**inputs: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "recurrent_kda_golden", interrupted)
    assert main(["demo", str(text_file), *SHORT]) == 130
    out, err = capsys.readouterr()
    assert err == "kda demo: interrupted\n"
    table = out[out.index("Time") :]
    assert all(name in table for name in ("one run", "prefill", "decode")) and "golden" not in table
    assert "Agreement" not in out


def test_demo_refuses_a_device_or_backend_that_is_not_there(
    text_file: Path, register, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", str(text_file), *SHORT, "--device", "nosuch"]) == 2
    assert "nosuch" in capsys.readouterr().err
    assert main(["demo", str(text_file), *SHORT, "--backend", "nosuch"]) == 2
    assert "kda demo: error: --backend: expected one of auto, tilelang, pypto, torch, got 'nosuch'" in (
        capsys.readouterr().err
    )
    register("pypto", FakeBackend()).missing.append("no such card")
    assert main(["demo", str(text_file), *SHORT, "--backend", "pypto"]) == 2
    out, err = capsys.readouterr()
    assert "pypto" in err and "no such card" in err and not out
