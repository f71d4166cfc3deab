"""`python -m kda gate`: run the cases on one backend, show a table, exit with 1 if anything failed."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import kda
from kda import backends
from kda.cli import options
from kda.cli.console import Column, open_console, progress_bar, say, show_table
from kda.cli.options import UsageError
from kda.cli.report import write_report
from kda.gates import report
from kda.gates.case import CASES, GRADIENTS, Case, Result, run_case
from kda.gates.dry import calls_of

# isort: off
from kda.gates import shapes, numerics, robustness, gradients, decode, pools  # noqa: F401  (they fill the table in order)
# isort: on

_COLOURS = {"passed": "green", "failed": "bold red", "skipped": "yellow", "refused": "yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m kda gate`."""
    options.add_backend(parser)
    parser.add_argument("--case", nargs="+", metavar="ID", dest="cases", help="these cases only, slow ones included")
    parser.add_argument("--slow", action="store_true", help="the slow cases as well")
    options.add_dtype(parser, "of q, k and v", "bf16")
    options.add_device(parser)
    options.add_files(parser, "draw the error of o along tokens and channels")
    whole = "write there, as text, what to attach to an issue: versions, the gates, and times beside a model's"
    parser.add_argument("--report", metavar="FILE", type=Path, help=whole)
    parser.add_argument("--list", action="store_true", help="list the cases and stop")


def run(args: argparse.Namespace) -> int:
    """Run the gates; 0 if none failed and at least one passed, else 1. Raises UsageError before anything runs."""
    console = open_console()
    if args.list:
        rows = [(case.id, case.title, "slow" if case.slow else "") for case in CASES.values()]
        show_table(console, (Column("case"), Column("what it holds", least=20), Column("")), rows)
        return 0
    if unknown := [id for id in args.cases or () if id not in CASES]:
        raise UsageError(f"--case: unknown {', '.join(unknown)}; known: {', '.join(CASES)}")
    options.check_files(args)
    device = options.device(args)
    backend = options.usable_backend(args, device)
    chosen = [CASES[id] for id in args.cases] if args.cases else [c for c in CASES.values() if args.slow or not c.slow]
    about = f"{backend} on {device}, {args.dtype}"
    say(console, f"kda {kda.__version__}, torch {torch.__version__}: backend {about}")
    results: list[Result] = []

    def ended(result: Result) -> None:
        results.append(result)
        if args.json:
            so_far = _as_json(results, backend, device, args.dtype)
            write_report(args.json, so_far, complete=len(results) == len(chosen))

    dtype = options.DTYPES[args.dtype]
    wait = _build_ahead(chosen, backend, device, dtype)
    try:
        _run_all(console, chosen, backend, device, dtype, ended)
    finally:  # also what there is when the run is ended early
        if results:
            show(console, results, of=len(chosen))
    wait()
    if args.plot:
        from kda.gates.plot import draw

        if not draw(results, args.plot, about):
            say(console, f"--plot: no case left an error of o to draw; {args.plot} was not written")
    if args.report:
        shown = functools.partial(show, results=results)
        report.write(args.report, shown, backend, device, args.dtype, dtype)
    outcomes = [result.outcome for result in results]
    return 0 if "passed" in outcomes and "failed" not in outcomes else 1


def _build_ahead(cases: list[Case], backend: str, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """Let a backend that can build kernels for calls to come begin with those of all cases, while the first ones run.

    Such a backend has `build_ahead(calls)`, which starts the work and returns a function that waits for its end. It is
    not called when the run is ended early, so the work has to end with this process by itself.
    """
    build = getattr(backends.load(backend), "build_ahead", None)
    return (lambda: None) if build is None else build(calls_of(cases, backend, device, dtype))


def _run_all(
    console: Console, cases: list[Case], backend: str, device: torch.device, dtype: torch.dtype,
    ended: Callable[[Result], None],
) -> None:  # fmt: skip
    """Call `ended` with each result as its case ends; that is a line, where there is no terminal to show a bar."""
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=case.id)
            result = run_case(case, backend, device, dtype)
            ended(result)
            if progress.disable:
                say(console, f"{case.id} {result.outcome} {result.seconds:.1f} s")
            progress.advance(task)


def show(console: Console, results: Sequence[Result], of: int | None = None) -> None:
    """Print the table, then every reason and every finding that is not as it should be; `of` so many cases."""
    columns = (Column("case"), Column("what it holds", least=20), Column("rel RMSE o", number=True),
               Column("state", number=True), Column("gradients", number=True),
               Column("seconds", number=True, needed=False), Column("outcome"))  # fmt: skip
    of_gradients = [f"d{name}" for name in GRADIENTS]
    rows = [
        (r.case.id, r.case.title, _worst(r, "o"), _worst(r, "state"), _worst(r, *of_gradients), f"{r.seconds:.1f}",
         f"[{_COLOURS[r.outcome]}]{r.outcome}[/]")
        for r in results
    ]  # fmt: skip
    show_table(console, columns, rows)
    for result in results:
        if result.reason:
            say(console, f"\n{result.case.id} {result.outcome}: {result.reason}")
        for finding in result.findings:
            if not finding.ok:
                say(console, f"\n{result.case.id}, {finding.what}: {finding.text}")
    counts = {outcome: sum(r.outcome == outcome for r in results) for outcome in _COLOURS}
    total = sum(result.seconds for result in results)
    missing = 0 if of is None else of - len(results)
    told = [f"{n} {outcome}" for outcome, n in counts.items() if n] + [f"{missing} not run"] * (missing > 0)
    console.print("\n" + ", ".join(told) + f" in {total:.0f} s")


def _worst(result: Result, *tensors: str) -> str:
    """The largest relative RMSE among the findings about these tensors (a NaN counts as the largest)."""
    errors = [f.comparison.rel_rmse for f in result.findings if f.comparison and f.what.split()[-1] in tensors]
    return f"{max(errors, key=lambda e: (e != e, e)):.1e}" if errors else ""


def _as_json(results: list[Result], backend: str, device: torch.device, dtype: str) -> dict[str, Any]:
    return {
        "kda": kda.__version__, "torch": torch.__version__, "backend": backend, "device": str(device), "dtype": dtype,
        "cases": [
            {
                "id": r.case.id, "title": r.case.title, "outcome": r.outcome, "reason": r.reason, "seconds": r.seconds,
                "findings": [
                    {
                        "what": f.what, "ok": f.ok, "text": f.text,
                        "rel_rmse": f.comparison and f.comparison.rel_rmse,
                        "max_diff": f.comparison and f.comparison.max_diff,
                    }
                    for f in r.findings
                ],
            }
            for r in results
        ],
    }  # fmt: skip
