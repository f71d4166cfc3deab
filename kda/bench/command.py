"""`python -m kda bench`: time a backend on the table of cases, against the machine's copy bandwidth and matmul rate."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import kda
from kda import backends
from kda.bench import cases, measure
from kda.bench.cases import CASES, HOST_CASE, PEER_CASES, Case, Decode
from kda.bench.measure import Ceilings, Measurement
from kda.console import open_console, plot_problem, progress_bar
from kda.info import devices, versions

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALED = ("Scaled down for the CPU: a 16th of the heads, a 32nd of the tokens, in decoding a 16th of the sequences. "
          "These are not the cases of the table.")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m kda bench`."""
    names = ", ".join(("auto", *backends.NAMES))
    parser.add_argument("--backend", metavar="NAME", help=f"one of {names} (default: $KDA_BACKEND, else auto)")
    parser.add_argument("--case", nargs="+", metavar="ID", dest="cases", help=f"these only, of {', '.join(CASES)}")
    peers = f"flash-linear-attention beside it, on the cases named, else {', '.join(PEER_CASES)}: it tunes for minutes"
    parser.add_argument("--peers", action="store_true", help=peers)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of q, k, v, g, beta (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small versions of the cases")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every figure there, in SI units")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the roofline")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; 0 if the backend ran every case, 1 if not, 2 for wrong usage or a machine that cannot."""
    console = open_console()
    say = functools.partial(console.print, markup=False, soft_wrap=True)
    backend = args.backend or os.environ.get("KDA_BACKEND") or "auto"
    if backend == "auto":
        backend = backends.for_device(args.device)
    if problem := _problem(args, backend):
        say(problem)
        return 2
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    about = dict(devices())["cuda:0" if args.device == "cuda" else "cpu"]
    say(", ".join(f"{name} {version}" for name, version in versions()) + f", CUDA {torch.version.cuda}")
    say(f"backend {backend}, {args.dtype}, on {about}")
    if args.device == "cpu":
        say(SCALED)
    peers = _peer(say) if args.peers else {}
    best = measure.ceilings(device, dtype)
    say(f"copy {best.copy / 1e9:.0f} GB/s (read plus written), matmul {best.matmul / 1e12:.4g} TFLOP/s, both measured")
    measurements = _run_all(console, args, backend, peers)
    _show(console, measurements, best)
    if args.json:
        args.json.write_text(json.dumps(_as_json(args, backend, about, measurements, best), indent=1) + "\n")
    if args.plot:
        from kda.bench.plot import draw

        draw(measurements, best, args.plot, f"{backend}, {args.dtype}, on {about}")
    return 1 if any(m.error for m in measurements if m.operator == "kda") else 0


def _problem(args: argparse.Namespace, backend: str) -> str | None:
    """What keeps the benchmark from running as asked."""
    unknown = [id for id in args.cases or () if id not in CASES]
    if unknown:
        return f"--case: unknown {', '.join(unknown)}; known: {', '.join(CASES)}"
    if args.device == "cuda" and not torch.cuda.is_available():
        return "bench: no CUDA device here; --device cpu runs small versions of the cases on the CPU"
    if args.plot and (missing := plot_problem(args.plot)):
        return missing
    try:
        reasons = backends.unusable(backend)
    except ValueError as unknown_name:
        return str(unknown_name)
    return f"backend {backend} cannot be used: {'; '.join(reasons)}" if reasons else None


def _peer(say: Callable[[str], None]) -> dict[str, Callable[..., Any]]:
    """flash-linear-attention's operators, as bounded gates allow them; none, and a word, where it is missing."""
    try:
        fla, ops = importlib.import_module("fla"), importlib.import_module("fla.ops.kda")
    except ImportError as error:
        say(f"--peers: flash-linear-attention is not installed here ({error}); going on without it")
        return {}
    say(f"peer: flash-linear-attention {fla.__version__}, safe_gate=True")
    recurrent = ops.fused_recurrent_kda
    return {"chunk_kda": functools.partial(ops.chunk_kda, safe_gate=True), "fused_recurrent_kda": recurrent}


def _run_all(
    console: Console, args: argparse.Namespace, backend: str, peers: dict[str, Callable[..., Any]]
) -> list[Measurement]:
    device, chosen = torch.device(args.device), args.cases or list(CASES)
    found = []
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(chosen))
        for id in chosen:
            progress.update(task, description=id)
            case = CASES[id] if args.device == "cuda" else CASES[id].scaled_down()
            inputs = case.inputs(device, DTYPES[args.dtype])
            operators = {"kda": functools.partial(getattr(kda, case.operator), backend=backend)}
            if case.operator in peers and (args.cases or id in PEER_CASES):
                operators["fla"] = peers[case.operator]
            on_device, decode = args.device == "cuda", isinstance(case, Decode)
            for name, operator in operators.items():
                call = functools.partial(operator, **inputs)
                host = on_device and (decode or id == HOST_CASE)
                found.append(measure.measure(case, name, call, device, host=host, graph=on_device and decode))
            progress.advance(task)
    return found


def _show(console: Console, measurements: list[Measurement], best: Ceilings) -> None:
    table = Table(box=None)
    for column in ("case", "operator", "H", "T"):
        table.add_column(column)
    for column in ("ms", "MB", "GB/s", "of copy", "GFLOP", "TFLOP/s", "of matmul", "host ms", "graph ms"):
        table.add_column(column, justify="right")
    for m in measurements:
        case, figures = m.case, ["failed", *[""] * 8]
        if m.seconds:
            of_copy, of_matmul = m.bytes_per_second / best.copy, m.flops_per_second / best.matmul
            figures = [
                f"{m.seconds * 1e3:.3f}",
                f"{case.moved_bytes / 1e6:.1f}", f"{m.bytes_per_second / 1e9:.4g}", f"{of_copy:.1%}",
                f"{case.flops / 1e9:.2f}", f"{m.flops_per_second / 1e12:.4g}", f"{of_matmul:.1%}",
                *("" if s is None else f"{s * 1e3:.3f}" for s in (m.host_seconds, m.graph_seconds)),
            ]  # fmt: skip
        table.add_row(case.id, m.operator, str(case.H), _lengths(case), *figures)
    console.print(table)
    for m in measurements:
        if m.error:
            console.print(f"{m.case.id}, {m.operator}: {m.error}", markup=False, soft_wrap=True)
    note = functools.partial(console.print, markup=False, soft_wrap=True)
    note(f"bytes: {cases.BYTES_FORMULA} ({cases.BYTES_MEANING})")
    note(f"FLOP, {cases.FLOPS_FORMULA} ({cases.FLOPS_MEANING}); {cases.RECURRENT_FLOPS_FORMULA}")
    note(f"graph ms: of one call where a CUDA graph replays {measure.STEPS}")


def _lengths(case: Case) -> str:
    if len(set(case.lengths)) > 1:
        return f"{case.tokens} in {len(case.lengths)}"
    return str(case.lengths[0]) if len(case.lengths) == 1 else f"{len(case.lengths)} x {case.lengths[0]}"


def _as_json(args: argparse.Namespace, backend: str, about: str, found: list[Measurement], best: Ceilings) -> dict:
    return {
        "versions": {**dict(versions()), "cuda": torch.version.cuda}, "device": about, "backend": backend,
        "dtype": args.dtype, "scaled_down": args.device == "cpu",
        "copy_bytes_per_second": best.copy, "matmul_flops_per_second": best.matmul,
        "bytes_formula": cases.BYTES_FORMULA, "flops_formula": cases.FLOPS_FORMULA,
        "recurrent_flops_formula": cases.RECURRENT_FLOPS_FORMULA,
        "runs": measure.RUNS if args.device == "cuda" else measure.CPU_RUNS, "host_runs": measure.HOST_RUNS,
        "measurements": [
            {
                "case": m.case.id, "operator": m.operator, "H": m.case.H, "lengths": m.case.lengths,
                "K": m.case.K, "V": m.case.V, "bytes": m.case.moved_bytes, "flops": m.case.flops,
                "seconds": m.seconds, "host_seconds": m.host_seconds, "graph_seconds": m.graph_seconds,
                "error": m.error,
                "bytes_per_second": m.bytes_per_second, "share_of_copy": m.seconds and m.bytes_per_second / best.copy,
                "flops_per_second": m.flops_per_second,
                "share_of_matmul": m.seconds and m.flops_per_second / best.matmul,
            }
            for m in found
        ],
    }  # fmt: skip
