"""`python -m kda gate`: run the cases on one backend, show a table, exit with 1 if anything failed."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import kda
from kda import backends
from kda.console import open_console, plot_problem, progress_bar
from kda.gates.case import CASES, Case, Result, run_case

# isort: off
from kda.gates import shapes, numerics, robustness, decode  # noqa: F401  (they fill the table, in this order)
# isort: on

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_COLOURS = {"passed": "green", "failed": "bold red", "skipped": "yellow", "refused": "yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m kda gate`."""
    names = ", ".join(("auto", *backends.NAMES))
    parser.add_argument("--backend", metavar="NAME", help=f"one of {names} (default: $KDA_BACKEND, else auto)")
    parser.add_argument("--case", nargs="+", metavar="ID", dest="cases", help="these cases only, slow ones included")
    parser.add_argument("--slow", action="store_true", help="the slow cases as well")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of q, k and v (default: %(default)s)")
    parser.add_argument("--device", help="cpu, cuda, npu ... (default: the accelerator that is there, else cpu)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every finding there")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the error of o along tokens and channels")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")


def run(args: argparse.Namespace) -> int:
    """Run the gates; 0 if none failed and at least one passed, 1 otherwise, 2 for an unknown case or option."""
    console = open_console()
    if args.list:
        _list(console)
        return 0
    unknown = [id for id in args.cases or () if id not in CASES]
    if unknown:
        console.print(f"--case: unknown {', '.join(unknown)}; known: {', '.join(CASES)}", markup=False, soft_wrap=True)
        return 2
    if args.plot and (missing := plot_problem(args.plot)):
        console.print(missing, markup=False, soft_wrap=True)
        return 2
    device = args.device or _default_device()
    backend = args.backend or os.environ.get("KDA_BACKEND") or "auto"
    if backend not in ("auto", *backends.NAMES):
        source = "--backend" if args.backend else "KDA_BACKEND"
        known = ", ".join(("auto", *backends.NAMES))
        console.print(f"{source}: expected one of {known}, got {backend!r}", markup=False, soft_wrap=True)
        return 2
    if backend == "auto":
        backend = backends.for_device(torch.device(device).type)
    if reasons := backends.unusable(backend):
        console.print(f"backend {backend} cannot be used: {'; '.join(reasons)}", markup=False, soft_wrap=True)
        return 2
    chosen = [CASES[id] for id in args.cases] if args.cases else [c for c in CASES.values() if args.slow or not c.slow]
    about = f"{backend} on {device}, {args.dtype}"
    console.print(f"kda {kda.__version__}, torch {torch.__version__}: backend {about}", markup=False, soft_wrap=True)
    results = _run_all(console, chosen, backend, device, DTYPES[args.dtype])
    _show(console, results)
    if args.json:
        args.json.write_text(json.dumps(_as_json(results, backend, device, args.dtype), indent=1) + "\n")
    if args.plot:
        from kda.gates.plot import draw

        draw(results, args.plot, about)
    outcomes = [result.outcome for result in results]
    return 0 if "passed" in outcomes and "failed" not in outcomes else 1


def _default_device() -> str:
    """The accelerator, unless kernels are to be executed on the CPU; of NPUs, the one that PyPTO's variable names."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or os.environ.get("KDA_EMULATE") == "1":
        return "cpu"
    return f"npu:{os.environ.get('TILE_FWK_DEVICE_ID', 0)}" if accelerator.type == "npu" else accelerator.type


def _list(console: Console) -> None:
    table = Table("case", "what it holds", "", box=None)
    for case in CASES.values():
        table.add_row(case.id, case.title, "slow" if case.slow else "")
    console.print(table)


def _run_all(console: Console, cases: list[Case], backend: str, device: str, dtype: torch.dtype) -> list[Result]:
    results = []
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=case.id)
            results.append(run_case(case, backend, device, dtype))
            progress.advance(task)
    return results


def _show(console: Console, results: list[Result]) -> None:
    table = Table("case", "what it holds", "rel RMSE o", "state", "seconds", "outcome", box=None)
    for result in results:
        colour = _COLOURS[result.outcome]
        table.add_row(
            result.case.id, result.case.title, _worst(result, "o"), _worst(result, "state"),
            f"{result.seconds:.1f}", f"[{colour}]{result.outcome}[/]",
        )  # fmt: skip
    console.print(table)
    for result in results:
        if result.reason:
            console.print(f"\n{result.case.id} {result.outcome}: {result.reason}", markup=False, soft_wrap=True)
        for finding in result.findings:
            if not finding.ok:
                console.print(f"\n{result.case.id}, {finding.what}: {finding.text}", markup=False, soft_wrap=True)
    counts = {outcome: sum(r.outcome == outcome for r in results) for outcome in _COLOURS}
    total = sum(result.seconds for result in results)
    console.print("\n" + ", ".join(f"{n} {outcome}" for outcome, n in counts.items() if n) + f" in {total:.0f} s")


def _worst(result: Result, what: str) -> str:
    """The largest relative RMSE among the findings about `o` or `state` (a NaN counts as the largest)."""
    errors = [f.comparison.rel_rmse for f in result.findings if f.comparison and f.what.split()[-1] == what]
    return f"{max(errors, key=lambda e: (e != e, e)):.1e}" if errors else ""


def _as_json(results: list[Result], backend: str, device: str, dtype: str) -> dict:
    return {
        "kda": kda.__version__, "torch": torch.__version__, "backend": backend, "device": device, "dtype": dtype,
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
