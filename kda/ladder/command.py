"""`python -m kda ladder`: from linear attention to KDA, every level against every form of it, counted and timed."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console

from kda.cli import options
from kda.cli.console import Column, open_console, say, show_table, working
from kda.cli.info import described, versions
from kda.cli.options import UsageError
from kda.cli.report import write_report
from kda.golden.constants import CHUNK_SIZE

from . import kernels, rounding, timing
from .consistency import FORMS, Check, checks
from .ledger import Ledger
from .rounding import Rounding
from .timing import LevelResult, Times

CHUNKS_TO_COMPARE = (32, 64, 128, 256)
LENGTHS = (512, 2048, 8192, 16384, 65536)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m kda ladder`."""
    parser.add_argument("--level", type=int, choices=tuple(FORMS), help="this level only (default: all)")
    sizes = {
        "D": (64, "key and value channels of a head"), "BC": (64, "tokens of a chunk, in the ledger"),
        "block-V": (32, "columns of the state to a block, in the ledger"), "heads": (32, "heads, one sequence"),
    }  # fmt: skip
    for name, (default, text) in sizes.items():
        shown = f"{text} (default: {default})"
        parser.add_argument(f"--{name}", type=options.positive_int, default=default, metavar="N", help=shown)
    shown = f"lengths of the ledger, tokens (default: {' '.join(map(str, LENGTHS))})"
    parser.add_argument("--N", type=options.positive_int, nargs="+", default=LENGTHS, metavar="N", help=shown)
    options.add_files(parser, "draw work, time and error; not with --level 2 … 5")


def run(args: argparse.Namespace) -> int:
    """Run the ladder; 0 if every check holds, 1 if not. Raises UsageError before anything runs."""
    if args.plot and args.level not in (None, 1):
        raise UsageError(f"--plot: draws level 1, got --level {args.level}")
    options.check_files(args)
    console = open_console()
    wanted = [args.level] if args.level else list(FORMS)
    missing = timing.missing(args.D)
    device = torch.device("cpu") if missing else timing.DEVICE
    if not missing and 1 in wanted:
        longest = timing.LENGTHS[-1] * args.heads * args.D  # numbers of q, k, v or o
        options.check_memory(device, longest * 2 * (8 + args.D // CHUNK_SIZE), "take fewer --heads")
    about = described(device)
    say(console, ", ".join(f"{name} {version}" for name, version in versions()) + f"; on {about}")

    ledgers = [Ledger(N, args.D, args.BC, args.block_V, args.heads) for N in sorted(set(args.N))]
    rounded: Rounding | None = None
    results: list[LevelResult] = []
    times: Times | None = None
    with working(console, "references") as status:  # each part is shown at once: the run may be ended early
        found = sorted((check for check in checks() if check.level in wanted), key=lambda check: check.level)
        _show_checks(console, found)
        if 1 in wanted:
            _show_ledger(console, ledgers)
            kernel = None if missing else functools.partial(kernels.run, "linattn_seq_in_loop")
            rounded = rounding.measure(device, kernel)
            _show_rounding(console, rounded)
        if not missing:
            try:
                for level in wanted:
                    results += timing.levels(args.D, [level], device, status.update)
            finally:
                if results:
                    _show_levels(console, results, args.D)
            if 1 in wanted:
                times = timing.times(args.D, args.heads, device, status.update)
                _show_times(console, times, args)
    if missing:
        parts = "errors and times of the kernels" + (", crossover and exponents" if rounded else "")
        say(console, f"\nNot measured, since it takes a Hopper GPU: {parts}. Here: {'; '.join(missing)}.")
    if args.json:
        report = _as_json(about, missing, found, ledgers, rounded, results, times)
        write_report(args.json, report)
    if args.plot and rounded:
        from .plot import draw

        draw(ledgers, times, rounded, args.plot, f"Level 1, linear attention; {about}")
    return 0 if all(check.ok for check in found) and all(result.ok for result in results) else 1


def _show_checks(console: Console, found: list[Check]) -> None:
    rows = [
        (str(check.level), check.what, f"{check.error:.3g}",
         f"{check.low:g} … {check.high:g}" if check.low else f"≤ {check.high:g}", _verdict(check.ok))
        for check in found
    ]  # fmt: skip
    show_table(console, _columns("level", "references, fp64", numbers=("relative L2", "allowed"), last=""), rows)


def _show_ledger(console: Console, ledgers: list[Ledger]) -> None:
    first, last = ledgers[0], ledgers[-1]
    D, BC, width = first.D, first.BC, first.block_V
    say(console, f"\nLedger of level 1: D {D}, BC {BC}; GFLOP of one head, snapshots of {first.heads}. Prefixes anew: "
                 "each chunk sums up all that lies before it")  # fmt: skip
    columns = _columns(numbers=("N", "prefixes anew", "linear", "causal", "anew/causal"),
                       spare=("linear/causal", "redundancy", "chunks", "snapshots, MiB"))  # fmt: skip
    rows = [
        (str(x.N), *(f"{y / 1e9:.3f}" for y in (x.recomputed_flops, x.linear_flops, x.attention_flops)),
         f"{x.recomputed_over_attention:.3f}", f"{x.linear_over_attention:.3f}",
         f"{x.redundancy:.1f}x", str(x.chunks), f"{x.snapshot_bytes / 2**20:.4g}")
        for x in ledgers
    ]  # fmt: skip
    show_table(console, columns, rows)
    columns = _columns(numbers=("BC", "D/(2 BC)", f"at N {last.N}", "registers for scores"))
    sizes = [Ledger(last.N, D, size, width, last.heads) for size in sorted({*CHUNKS_TO_COMPARE, BC})]
    rows = [
        (str(x.BC), f"{x.recomputed_limit:.3f}", f"{x.recomputed_over_attention:.3f}", f"{x.score_registers:.4g}")
        for x in sizes
    ]
    show_table(console, columns, rows)
    say(console, f"block_V {width}: q and k are read {first.tiles} times, {first.blocks} blocks work side by side, "
                 f"the state takes {first.state_registers:.4g} registers a thread")  # fmt: skip


def _show_rounding(console: Console, rounded: Rounding) -> None:
    console.print(f"\nThe state rounded to fp16, N {rounding.N}, D {rounding.D}: growth with the chunk's index c")
    for name, exponent in rounded.growth().items():
        console.print(f"  {name}: c^{exponent:.2f}")
    at = [1, len(rounded.output) // 2, len(rounded.output) - 1]
    values = ", ".join(f"{(rounded.state_error / rounded.output)[c]:.2e} in chunk {c}" for c in at)
    say(console, f"  error by rounding the state over the output: {values}")


def _show_levels(console: Console, results: list[LevelResult], D: int) -> None:
    errors, timed = timing.ERROR_SHAPE, timing.TIME_SHAPE
    console.print(f"\nKernels: errors at N {errors['N']}, time at N {timed['N']}, {timed['H']} heads, bf16; D {D}")
    rows = [
        (str(x.level), x.name, *(f"{error:.2e}" for error in x.errors.values()), f"{x.seconds * 1e3:.3f}",
         _verdict(x.ok))
        for x in results
    ]  # fmt: skip
    show_table(console, _columns("level", "kernel", numbers=(*timing.DTYPES, "ms"), last=""), rows)


def _show_times(console: Console, times: Times, args: argparse.Namespace) -> None:
    console.print(f"\nLevel 1 against causal attention: D {args.D}, {args.heads} heads, fp16, ms")
    rows = [
        (str(N), *(f"{seconds[i] * 1e3:.4f}" for seconds in times.seconds.values()))
        for i, N in enumerate(times.lengths)
    ]
    rows.append((f"exponent from {timing.FIT_FROM} on", *(f"{times.exponent(name):.2f}" for name in times.seconds)))
    show_table(console, _columns("N", numbers=tuple(times.seconds)), rows)
    for name, other, N in times.crossovers():
        what = "never up to the last length" if N is None else f"from N {N:.0f} on"
        console.print(f"{name} is faster than {other} {what}")


def _columns(*words: str, numbers: Sequence[str], spare: Sequence[str] = (), last: str | None = None) -> list[Column]:
    found = [Column(word) for word in words] + [Column(number, number=True) for number in numbers]
    found += [Column(number, number=True, needed=False) for number in spare]
    return found if last is None else [*found, Column(last)]


def _verdict(ok: bool) -> str:
    return "" if ok else "[bold red]FAILED[/]"


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
