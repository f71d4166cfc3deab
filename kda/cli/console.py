"""How commands print: the console, tables that fit its width, and a bar for what takes long."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.status import Status
from rich.table import Table
from rich.text import Text

from kda.cli.letters import spelled

Row = Sequence[str]

GAP = 2
"""Spaces between columns."""

ASCII_HEAD = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
"""rich's SIMPLE_HEAD for an encoding without its lines; what rich takes in its place is wider."""


class _Console(Console):
    """A console whose reader may go: the command ends then, in `kda.cli.ending`, not here."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Column(NamedTuple):
    """A column of `show_table`."""

    title: str
    number: bool = False  # to the right, and never wrapped
    needed: bool = True  # the others go, the last ones first, where the console is too narrow for all
    least: int | None = None  # characters that a column of words is readable with


def open_console() -> Console:
    """Where a command prints: as wide as the terminal or as $COLUMNS says, else, in a file, 120 columns."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    return _Console(width=None if terminal or "COLUMNS" in os.environ else 120, highlight=False)


def say(console: Console, text: str) -> None:
    """Print a line of plain text at once; a terminal wraps it."""
    console.print(text, markup=False, soft_wrap=True)


def show_facts(console: Console, rows: Sequence[Row]) -> None:
    """Print plain rows, indented, and an empty line; the last cells wrap within their column."""
    table = Table.grid(padding=(0, GAP, 0, 0))
    for _ in rows[0]:
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(escape(spelled(cell, console.encoding)) for cell in row))
    console.print(Padding(table, (0, 0, 1, GAP)))


def show_table(console: Console, columns: Sequence[Column], rows: Sequence[Row], *, title: str | None = None) -> None:
    """Print a table, with rich's markup in its cells, at the console's width; what has no room is named below it."""
    columns = [column._replace(title=spelled(column.title, console.encoding)) for column in columns]
    rows = [[spelled(cell, console.encoding) for cell in row] for row in rows]
    shown = list(range(len(columns)))
    least = [_least(column, [row[i] for row in rows]) for i, column in enumerate(columns)]
    for spare in [i for i in reversed(shown) if not columns[i].needed]:
        if sum(least[i] + GAP for i in shown) + GAP <= console.width:
            break
        shown.remove(spare)
    head = ASCII_HEAD if console.options.ascii_only else box.SIMPLE_HEAD
    table = Table(box=head, title=title, title_justify="left", pad_edge=False, padding=(0, GAP - 1, 0, 0))
    for column in (columns[i] for i in shown):
        table.add_column(column.title, justify="right" if column.number else "left", no_wrap=column.number,
                         overflow="fold", min_width=column.least)  # fmt: skip
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    console.print(table)
    if left_out := [column.title for i, column in enumerate(columns) if i not in shown]:
        console.print(f"(no room for {', '.join(left_out)}: a wider terminal shows them)", markup=False)


def _least(column: Column, cells: Sequence[str]) -> int:
    """The characters that a column needs: its longest number, or its longest word."""
    texts = [column.title, *(Text.from_markup(cell).plain for cell in cells)]
    pieces = texts if column.number else [word for text in texts for word in text.split()]
    return max([column.least or 0, *map(cell_len, pieces)])


def progress_bar(console: Console) -> Progress:
    """A bar over cases, in terminals alone, that is gone when they are done."""
    columns = TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_interactive)


def working(console: Console, text: str) -> Status:
    """A word about what is being done, in terminals alone, that is gone when it is done."""
    return console.status(text, spinner="line" if console.options.ascii_only else "dots")
