"""`python -m kda gate --report FILE`: what was found on a machine, in one file of text, to be attached to an issue.

It holds what `python -m kda info` prints, the gates, and the times of a few calls on the device beside those of the
backend's performance model, if it has one.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

import kda
from kda import backends
from kda.bench import model
from kda.bench.measure import measure
from kda.cli import info
from kda.cli.console import Column, say, show_table

TIMED = ("H1-T512", "H8-T1024", "T1024", "B16")
COLUMNS = (
    Column("case"), Column("H"), Column("T"),
    Column("ms", number=True), Column("ms in the model", number=True), Column(""),
)  # fmt: skip


def write(path: Path, show_gates: Callable[[Console], None], backend: str, device: torch.device, dtype: str,
          of_dtype: torch.dtype) -> None:  # fmt: skip
    """Write the report of a run whose gates `show_gates` prints."""
    text = io.StringIO()
    console = Console(file=text, width=120, highlight=False)
    say(console, f"python -m kda gate --report: backend {backend} on {device}, {dtype}\n")
    info.show(console)
    console.print("Gates")
    show_gates(console)
    console.print("\nTimes")
    if device.type == "cpu":
        say(console, "Nothing is timed on a CPU.")
    else:
        show_table(console, COLUMNS, [_timed(id, backend, device, of_dtype) for id in TIMED])
        say(console, "ms: the median of calls between the device's events")
    path.write_text(text.getvalue(), encoding="utf-8")


def _timed(id: str, backend: str, device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    case = model.SMALL[id]
    operator = functools.partial(getattr(kda, case.operator), backend=backend, **case.inputs(device, dtype))
    found = measure(case, "kda", operator, device, host=False, graph=False)
    in_model, error = "", found.error
    if (make := getattr(backends.load(backend), "model", None)) is not None:
        try:
            in_model = f"{model.of(case, dtype, make).seconds * 1e3:.3f}"
        except RuntimeError as reason:
            error = f"{error} model: {reason}".strip()
    ms = "" if found.seconds is None else f"{found.seconds * 1e3:.3f}"
    return id, str(case.H), str(case.tokens), ms, in_model, error
