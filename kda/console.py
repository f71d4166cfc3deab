"""What the commands share: the console, a bar for what takes long, and why a picture cannot be drawn."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def open_console() -> Console:
    """Where a command prints; as wide as the terminal, or 120 columns in a file."""
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def progress_bar(console: Console) -> Progress:
    """A bar over cases, in terminals alone, that is gone when they are done."""
    columns = TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def plot_problem(path: Path) -> str | None:
    """Why `--plot path` cannot be drawn, or None."""
    if path.suffix != ".png":
        return f"--plot: expected a name that ends in .png, got {path}"
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "--plot: needs matplotlib (the extra `plot`), which is not installed"
    return None
