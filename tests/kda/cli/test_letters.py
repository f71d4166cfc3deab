"""What a stream's encoding lacks is spelled out: no command raises on an ASCII terminal, and none prints escapes."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from kda.bench import command as bench
from kda.bench.cases import CASES
from kda.bench.measure import Ceilings, Measurement
from kda.cli import COMMANDS, main
from kda.cli.console import Column, progress_bar, say, show_facts, show_table, working
from kda.cli.letters import spell_out, spelled
from kda.ladder import rounding

pytestmark = pytest.mark.usefixtures("one_thread", "plain_environment")


class Stream(io.TextIOWrapper):
    """A stream in memory, of any encoding, that says it is a terminal or not."""

    def __init__(self, encoding: str, *, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding=encoding)
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    @property
    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


def test_formulas_keep_their_sense() -> None:
    assert spelled("C²·(6K + 4V) + C³/3 ≤ 1 … kᵀ v", "ascii") == "C^2*(6K + 4V) + C^3/3 <= 1 ... k^T v"
    assert spelled("C² ≤ 1", "latin-1") == "C² <= 1", "what the encoding has stays"
    assert spelled("C²·(6K + 4V) ≤ 1", "utf-8") == "C²·(6K + 4V) ≤ 1"


def test_what_has_no_spelling_is_escaped() -> None:
    """A file's name, above all: also one that is no text at all, which Python reads as lone surrogates."""
    assert spelled("grün", "ascii") == r"gr\xfcn" and spelled("界", "latin-1") == r"\u754c"
    assert spelled("no\udcfftext", "utf-8") == r"no\udcfftext"


def test_a_stream_that_cannot_change_is_left_alone() -> None:
    spell_out(None)
    spell_out(io.StringIO())


def ascii_output(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    stream = Stream("ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    try:
        assert main(arguments) == 0
    except SystemExit as stopped:
        assert stopped.code == 0
    monkeypatch.undo()
    return stream.text


@pytest.mark.parametrize(
    "arguments",
    [
        *([name, "--help"] for name in COMMANDS),
        ["info"],
        ["gate", "--list"],
        ["gate", "--case", "GVA", "--device", "cpu", "--backend", "torch"],
        ["bench", "--case", "T64", "--device", "cpu"],
        ["ladder", "--level", "1"],
        ["demo", "--prefill", "20", "--decode", "2", "--device", "cpu"],
    ],
    ids=" ".join,
)
def test_every_command_on_an_ascii_stream(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "N", 1024)
    out = ascii_output(monkeypatch, *arguments)
    assert out and "\\x" not in out and "\\u" not in out


def test_tables_stay_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream("ascii")
    console = Console(file=stream, width=60)
    show_table(console, (Column("what", least=10), Column("allowed", number=True)), [("a", "≤ 1"), ("b", "0.5 … 1")])
    lines = stream.text.splitlines()
    ends = {len(line.rstrip()) for line in lines if line.strip() and line.strip("- ") != ""}
    assert len(ends) == 1, lines
    assert any(set(line.strip()) == {"-"} for line in lines) and "|" not in stream.text and "+" not in stream.text


def test_bars_and_spinners_are_ascii_too() -> None:
    stream = Stream("ascii", terminal=True)
    console = Console(file=stream, width=60, force_terminal=True)
    with progress_bar(console) as progress:
        progress.advance(progress.add_task("case", total=2))
        progress.refresh()
    with working(console, "references") as status:
        status.update("more")
    assert "case" in stream.text


def test_what_a_gpu_prints_is_ascii_too() -> None:
    stream = Stream("ascii")
    spell_out(stream)
    console = Console(file=stream, width=120)
    bench.show(console, [Measurement(CASES["H96"], "kda", 1e-3, 4e-5, 7e-6)], Ceilings(4e12, 7e14))
    say(console, "2 · 3 ≤ 6")
    show_facts(console, [("fact", "K ≠ V")])
    assert "2 * 3 <= 6" in stream.text and "K != V" in stream.text and "\\" not in stream.text
