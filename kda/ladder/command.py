"""`python -m kda ladder`: from linear attention to KDA, every level against every form of it, counted and timed."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kda.console import open_console, plot_problem
from kda.info import devices, versions

from . import rounding, timing
from .consistency import FORMS, Check, checks
from .ledger import Ledger
from .rounding import Rounding
from .timing import LevelResult, Times

CHUNKS_TO_COMPARE = (32, 64, 128, 256)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m kda ladder`."""
    parser.add_argument("--level", type=int, choices=tuple(FORMS), help="this level only (default: all)")
    lengths = "lengths of the ledger, tokens (default: 512 2048 8192 16384 65536)"
    parser.add_argument("--N", type=int, nargs="+", default=[512, 2048, 8192, 16384, 65536], help=lengths, metavar="N")
    parser.add_argument("--D", type=int, default=64, help="key and value channels of a head (default: %(default)s)")
    parser.add_argument("--BC", type=int, default=64, help="tokens of a chunk, in the ledger (default: %(default)s)")
    columns = "columns of the state to a block, in the ledger (default: %(default)s)"
    parser.add_argument("--block-V", type=int, default=32, help=columns)
    parser.add_argument("--heads", type=int, default=32, help="heads, one sequence (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every figure there, in SI units")
    parser.add_argument(
        "--plot", metavar="FILE.png", type=Path, help="draw work, time and error; not with --level 2 … 5"
    )


def run(args: argparse.Namespace) -> int:
    """Run the ladder; 0 if every check holds, 1 if not, 2 for wrong usage."""
    console = open_console()
    say = functools.partial(console.print, markup=False, soft_wrap=True)
    if problem := _problem(args):
        say(problem)
        return 2
    wanted = [args.level] if args.level else list(FORMS)
    missing = timing.missing(args.D)
    device = torch.device("cpu") if missing else timing.DEVICE
    about = dict(devices())["cpu" if device.type == "cpu" else f"{device.type}:{device.index}"]
    say(", ".join(f"{name} {version}" for name, version in versions()) + f"; on {about}")

    with console.status("references") as status:
        found = sorted((check for check in checks() if check.level in wanted), key=lambda check: check.level)
        ledgers = [Ledger(N, args.D, args.BC, args.block_V, args.heads) for N in sorted(set(args.N))]
        kernel = None if missing else functools.partial(timing.kernels().run, "linattn_seq_in_loop")
        rounded = rounding.measure(device, kernel) if 1 in wanted else None
        results, times = [], None
        if not missing:
            results = timing.levels(args.D, wanted, device, status.update)
            times = timing.times(args.D, args.heads, device, status.update) if 1 in wanted else None

    _show_checks(console, found)
    if rounded:
        _show_ledger(console, ledgers)
        _show_rounding(console, rounded)
    if results:
        _show_levels(console, results, args.D)
    if times:
        _show_times(console, times, args)
    if missing:
        parts = "errors and times of the kernels" + (", crossover and exponents" if rounded else "")
        say(f"\nNot measured, since it takes a Hopper GPU: {parts}. Here: {'; '.join(missing)}.")
    if args.json:
        report = _as_json(about, missing, found, ledgers, rounded, results, times)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        from .plot import draw

        draw(ledgers, times, rounded, args.plot, f"Level 1, linear attention; {about}")
    return 0 if all(x.ok for x in (*found, *results)) else 1


def _problem(args: argparse.Namespace) -> str | None:
    """What keeps the ladder from running as asked."""
    for name, values in (("--N", args.N), ("--D", [args.D]), ("--BC", [args.BC]), ("--block-V", [args.block_V]),
                         ("--heads", [args.heads])):  # fmt: skip
        if min(values) < 1:
            return f"{name}: expected numbers from 1 on, got {min(values)}"
    if args.plot and args.level not in (None, 1):
        return f"--plot: draws level 1, got --level {args.level}"
    if args.plot and (missing := plot_problem(args.plot)):
        return missing
    for name, file in (("--json", args.json), ("--plot", args.plot)):
        if file and not file.parent.is_dir():
            return f"{name}: expected a file in a folder that exists, got {file}"
    return None


def _show_checks(console: Console, found: list[Check]) -> None:
    table = _table("level", "references, fp64", numbers=("relative L2", "allowed"))
    for check in found:
        allowed = f"{check.low:g} … {check.high:g}" if check.low else f"≤ {check.high:g}"
        verdict = "" if check.ok else "[bold red]FAILED[/]"
        table.add_row(str(check.level), check.what, f"{check.error:.3g}", allowed, verdict)
    console.print(table)


def _show_ledger(console: Console, ledgers: list[Ledger]) -> None:
    first, last = ledgers[0], ledgers[-1]
    D, BC, width = first.D, first.BC, first.block_V
    console.print(f"\nLedger of level 1: D {D}, BC {BC}; GFLOP of one head, snapshots of {first.heads}. Prefixes anew: "
                  "each chunk sums up all that lies before it", soft_wrap=True)  # fmt: skip
    table = _table(numbers=("N", "chunks", "redundancy", "prefixes anew", "linear", "causal", "anew/causal",
                            "linear/causal", "snapshots, MiB"))  # fmt: skip
    for x in ledgers:
        flops = (x.recomputed_flops, x.linear_flops, x.attention_flops)
        table.add_row(str(x.N), str(x.chunks), f"{x.redundancy:.1f}x", *(f"{y / 1e9:.3f}" for y in flops),
                      f"{x.recomputed_over_attention:.3f}", f"{x.linear_over_attention:.3f}",
                      f"{x.snapshot_bytes / 2**20:.4g}")  # fmt: skip
    console.print(table)
    table = _table(numbers=("BC", "D/(2 BC)", f"at N {last.N}", "registers a thread for the scores"))
    for x in (Ledger(last.N, D, size, width, last.heads) for size in sorted({*CHUNKS_TO_COMPARE, BC})):
        ratio = f"{x.recomputed_over_attention:.3f}"
        table.add_row(str(x.BC), f"{x.recomputed_limit:.3f}", ratio, f"{x.score_registers:.4g}")
    console.print(table)
    console.print(f"block_V {width}: q and k are read {first.tiles} times, {first.blocks} blocks work side by side, "
                  f"the state takes {first.state_registers:.4g} registers a thread", soft_wrap=True)  # fmt: skip


def _show_rounding(console: Console, rounded: Rounding) -> None:
    console.print(f"\nThe state rounded to fp16, N {rounding.N}, D {rounding.D}: growth with the chunk's index c")
    for name, exponent in rounded.growth().items():
        console.print(f"  {name}: c^{exponent:.2f}")
    at = [1, len(rounded.output) // 2, len(rounded.output) - 1]
    values = ", ".join(f"{(rounded.state_error / rounded.output)[c]:.2e} in chunk {c}" for c in at)
    console.print(f"  error by rounding the state over the output: {values}", soft_wrap=True)


def _show_levels(console: Console, results: list[LevelResult], D: int) -> None:
    errors, timed = timing.ERROR_SHAPE, timing.TIME_SHAPE
    console.print(f"\nKernels: errors at N {errors['N']}, time at N {timed['N']}, {timed['H']} heads, bf16; D {D}")
    table = _table("level", "kernel", numbers=(*timing.DTYPES, "ms"))
    for x in results:
        verdict = "" if x.ok else "[bold red]FAILED[/]"
        shown = (f"{error:.2e}" for error in x.errors.values())
        table.add_row(str(x.level), x.name, *shown, f"{x.seconds * 1e3:.3f}", verdict)
    console.print(table)


def _show_times(console: Console, times: Times, args: argparse.Namespace) -> None:
    console.print(f"\nLevel 1 against causal attention: D {args.D}, {args.heads} heads, fp16, ms")
    table = _table("N", numbers=tuple(times.seconds))
    for i, N in enumerate(times.lengths):
        table.add_row(str(N), *(f"{seconds[i] * 1e3:.4f}" for seconds in times.seconds.values()))
    table.add_row(f"exponent from {timing.FIT_FROM} on", *(f"{times.exponent(name):.2f}" for name in times.seconds))
    console.print(table)
    for name, other, N in times.crossovers():
        what = "never up to the last length" if N is None else f"from N {N:.0f} on"
        console.print(f"{name} is faster than {other} {what}")


def _table(*names: str, numbers: Sequence[str]) -> Table:
    table = Table(*names, box=None)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _as_json(
    about: str, missing: list[str], found: list[Check], ledgers: list[Ledger], rounded: Rounding | None,
    results: list[LevelResult], times: Times | None,
) -> dict[str, Any]:  # fmt: skip
    counted = [name for name, value in vars(Ledger).items() if isinstance(value, property)]
    report: dict[str, Any] = {
        "versions": dict(versions()), "device": about, "not_measured_because": missing,
        "checks": [asdict(check) | {"ok": check.ok} for check in found],
        "levels": [asdict(x) | {"ok": x.ok} for x in results],
    }  # fmt: skip
    if rounded:
        report["ledger"] = [asdict(x) | {name: getattr(x, name) for name in counted} for x in ledgers]
        series = {"output": rounded.output, "state_error": rounded.state_error, "kernel_error": rounded.kernel_error}
        report["rounding"] = {"N": rounding.N, "heads": rounding.HEADS, "D": rounding.D, "growth": rounded.growth()}
        report["rounding"] |= {name: None if x is None else x.tolist() for name, x in series.items()}
    if times:
        report["times"] = asdict(times) | {
            "exponents": {name: times.exponent(name) for name in times.seconds},
            "crossovers": [{"faster": name, "than": other, "from": N} for name, other, N in times.crossovers()],
        }
    return report
