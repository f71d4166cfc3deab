"""How commands print: tables that fit, and no column lost without a word."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kda.cli.console import Column, progress_bar, show_facts, show_table

COLUMNS = (
    Column("case"),
    Column("needed", number=True),
    Column("spare", number=True, needed=False),
    Column("last", needed=False),
)
ROWS = [("L0", "1.25", "2.5", "words"), ("V4", "100.5", "7", "more words")]


def shown(width: int) -> str:
    file = io.StringIO()
    show_table(Console(file=file, width=width), COLUMNS, ROWS)
    return file.getvalue()


def test_a_wide_console_shows_every_column() -> None:
    out = shown(80)
    assert all(column.title in out for column in COLUMNS) and "no room for" not in out
    assert all(cell in out for row in ROWS for cell in row)


@pytest.mark.parametrize(("width", "missing"), [(28, ["last"]), (20, ["spare", "last"])])
def test_a_narrow_console_names_what_it_leaves_out(width: int, missing: list[str]) -> None:
    table, _, rest = shown(width).partition("(no room for ")
    assert " ".join(rest.split()).startswith(f"{', '.join(missing)}: ")
    assert not any(title in table for title in missing) and "100.5" in table
    assert max(len(line) for line in table.splitlines()) <= width


def test_words_wrap_and_numbers_do_not() -> None:
    file = io.StringIO()
    columns = (Column("what", least=12), Column("number", number=True))
    show_table(Console(file=file, width=26), columns, [("several words to wrap", "1234567890")])
    lines = file.getvalue().splitlines()
    assert any("several" in line and "1234567890" in line for line in lines) and len(lines) > 3
    assert max(map(len, lines)) <= 26


def test_facts_are_plain_and_wrap_within_their_column() -> None:
    file = io.StringIO()
    show_facts(Console(file=file, width=30), [("pypto", "no [driver] and then many more words"), ("torch", "here")])
    lines = file.getvalue().rstrip().splitlines()
    column = lines[0].index("no [driver]")
    assert len(lines) > 2 and all(line[:column].strip() in ("pypto", "torch", "") for line in lines)
    assert max(map(len, lines)) <= 30


def test_a_file_gets_no_bar() -> None:
    file = io.StringIO()
    with progress_bar(Console(file=file)) as progress:
        progress.advance(progress.add_task("", total=1))
    assert file.getvalue().strip() == ""
