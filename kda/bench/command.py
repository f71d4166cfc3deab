"""`python -m kda bench`: time a backend on the table of cases, against the machine's copy bandwidth and matmul rate."""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

import kda
from kda.bench import cases, measure, model
from kda.bench.cases import CASES, FEW_HEADS, HOST_CASE, PEER_CASES, TRAINING, Case, Decode, Train
from kda.bench.measure import Ceilings, Measurement
from kda.cli import options
from kda.cli.console import Column, open_console, progress_bar, say, show_table
from kda.cli.info import described, versions
from kda.cli.options import UsageError
from kda.cli.report import write_report

SCALED = ("Scaled down for the CPU: a 16th of the heads, a 32nd of the tokens, in decoding a 16th of the sequences. "
          "These are not the cases of the table.")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m kda bench`."""
    options.add_backend(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--case", nargs="+", metavar="ID", dest="cases", help=f"these only, of {', '.join(CASES)}")
    training = "the training cases only (forward, backward, both, and peak memory), which else do not run"
    which.add_argument("--train", action="store_true", help=training)
    few = "the cases of few heads and long sequences only, which else do not run"
    which.add_argument("--few-heads", action="store_true", help=few)
    peers = f"flash-linear-attention beside it, on the cases named, else {', '.join(PEER_CASES)}: it tunes for minutes"
    parser.add_argument("--peers", action="store_true", help=peers)
    modelled = f"do not time them: run a performance model of the backend on them, or on {', '.join(model.SMALL)}"
    parser.add_argument("--model", action="store_true", help=modelled)
    options.add_dtype(parser, "of q, k, v, g, beta", "bf16", "bf16", "fp16")
    options.add_device(parser)
    options.add_files(parser, "draw the roofline")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; 0 if the backend ran every case, 1 if not. Raises UsageError before anything runs."""
    if args.model:
        return model.run(args)
    if unknown := [id for id in args.cases or () if id not in CASES]:
        raise UsageError(f"--case: unknown {', '.join(unknown)}; known: {', '.join(CASES)}")
    options.check_files(args)
    device = options.device(args)
    if device.type not in ("cuda", "npu", "cpu"):
        raise UsageError(f"--device: expected cuda, npu or cpu, got {device}")
    backend, dtype = options.usable_backend(args, device), options.DTYPES[args.dtype]
    console, about = open_console(), described(device)
    say(console, ", ".join(f"{name} {version}" for name, version in versions()) + f", CUDA {torch.version.cuda}")
    say(console, f"backend {backend}, {args.dtype}, on {about}")
    if device.type == "cpu":
        say(console, SCALED)
    peers = _peer(console) if args.peers else {}
    best = measure.ceilings(device, dtype)
    say(console, f"copy {best.copy / 1e9:.0f} GB/s (read plus written), matmul {best.matmul / 1e12:.4g} TFLOP/s, both "
                 "measured")  # fmt: skip
    measurements: list[Measurement] = []

    def save(complete: bool) -> None:
        if args.json:
            report = _as_json(args.dtype, backend, device, about, measurements, best)
            write_report(args.json, report, complete=complete)

    def ended(measurement: Measurement) -> None:
        measurements.append(measurement)
        save(complete=False)

    try:
        _run_all(console, args, backend, device, peers, ended)
    finally:  # also what there is when the run is ended early
        if measurements:
            show(console, measurements, best)
    save(complete=True)
    if args.plot:
        from kda.bench.plot import draw

        if not draw(measurements, best, args.plot, f"{backend}, {args.dtype}, on {about}"):
            say(console, f"--plot: no case has a time to draw; {args.plot} was not written")
    return 1 if any(m.error for m in measurements if m.operator == "kda") else 0


def _peer(console: Console) -> dict[str, Callable[..., Any]]:
    """flash-linear-attention's operators, as bounded gates allow them; none, and a word, where it is missing."""
    try:
        fla, ops = importlib.import_module("fla"), importlib.import_module("fla.ops.kda")
    except Exception as error:  # it is missing, or it or Triton miss something while they are imported
        found = "is not installed here" if isinstance(error, ImportError) else "cannot be used here"
        say(console, f"--peers: flash-linear-attention {found}; going on without it")
        _say_wrapped(console, f"{type(error).__name__}: {error}")
        return {}
    say(console, f"peer: flash-linear-attention {fla.__version__}, safe_gate=True")
    chunk = functools.partial(ops.chunk_kda, safe_gate=True)
    training = functools.partial(_with_own_sigmoid, chunk)
    return {"chunk_kda": chunk, "fused_recurrent_kda": ops.fused_recurrent_kda, "training": training}


def _with_own_sigmoid(
    operator: Callable[..., Any], beta: Tensor, use_beta_sigmoid_in_kernel: bool, **inputs: Any
) -> Any:
    """The operator, given step sizes: autograd goes through their sigmoid outside of it."""
    return operator(beta=beta.sigmoid() if use_beta_sigmoid_in_kernel else beta, **inputs)


def _group(args: argparse.Namespace) -> Sequence[str]:
    """The cases that run where none is named."""
    if args.train:
        return TRAINING
    if args.few_heads:
        return FEW_HEADS
    return [id for id in CASES if id not in TRAINING + FEW_HEADS]


def _run_all(
    console: Console, args: argparse.Namespace, backend: str, device: torch.device,
    peers: dict[str, Callable[..., Any]], ended: Callable[[Measurement], None],
) -> None:  # fmt: skip
    """Call `ended` with each measurement; that is a line, where there is no terminal to show a bar."""
    on_device = device.type != "cpu"
    chosen = args.cases or _group(args)
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(chosen))
        for id in chosen:
            progress.update(task, description=id)
            case = CASES[id] if on_device else CASES[id].scaled_down()
            inputs = case.inputs(device, options.DTYPES[args.dtype])
            operators: dict[str, Callable[..., Any]] = {
                "kda": functools.partial(getattr(kda, case.operator), backend=backend)
            }
            peer = peers.get("training" if isinstance(case, Train) else case.operator)
            if peer is not None and (args.cases or id in PEER_CASES):
                operators["fla"] = peer
            decode = isinstance(case, Decode)
            for name, operator in operators.items():
                if isinstance(case, Train):
                    found = measure.measure_training(case, name, operator, inputs, device)
                else:
                    call = functools.partial(operator, **inputs)
                    host = on_device and (decode or id == HOST_CASE)
                    captured = device.type == "cuda" and decode and backend != "torch"  # it reads indices on the host
                    found = measure.measure(case, name, call, device, host=host, graph=captured)
                ended(found)
                if progress.disable:
                    took = "failed" if found.seconds is None else f"{found.seconds * 1e3:.3f} ms"
                    say(console, f"{id} {name} {took}")
            progress.advance(task)


COLUMNS = (
    Column("case"), Column("operator"), Column("H", needed=False), Column("T"),
    *(Column(title, number=True, needed=title in ("ms", "of copy"))
      for title in ("ms", "of copy", "of matmul", "host ms", "graph ms", "GB/s", "TFLOP/s", "MB", "GFLOP")),
)  # fmt: skip
TRAINING_COLUMNS = (
    Column("case", least=max(map(len, TRAINING))), *COLUMNS[1:4],
    *(Column(title, number=True) for title in ("fwd ms", "bwd ms", "fwd+bwd ms", "peak MB")),
    *(Column(title, number=True, needed=False) for title in ("of copy", "of matmul", "TFLOP/s", "MB", "GFLOP")),
)  # fmt: skip
"""The last five are of both passes together."""


def show(console: Console, measurements: list[Measurement], best: Ceilings) -> None:
    """Print the tables, what failed, and what their figures are."""
    training = [m for m in measurements if m.case.id in TRAINING]
    others = [m for m in measurements if m.case.id not in TRAINING]
    if others:
        show_table(console, COLUMNS, [_row(m, best) for m in others])
    if training:
        show_table(console, TRAINING_COLUMNS, [_training_row(m, best) for m in training])
    for m in measurements:
        if m.error:
            _say_wrapped(console, f"{m.case.id}, {m.operator}: {m.error}")
    say(console, f"bytes: {cases.BYTES_FORMULA} ({cases.BYTES_MEANING}); {cases.TRAINING_BYTES_FORMULA}")
    say(console, f"FLOP, {cases.FLOPS_FORMULA} ({cases.FLOPS_MEANING}); {cases.TRAINING_FLOPS_FORMULA}; "
                 f"{cases.RECURRENT_FLOPS_FORMULA}")  # fmt: skip
    say(console, f"graph ms: of one call where a CUDA graph replays {measure.STEPS}")
    if training:
        say(console, "peak MB: the most memory in use during both passes, beyond the inputs and o's gradient")


def _say_wrapped(console: Console, text: str) -> None:
    """Print all lines of a message at the console's width."""
    console.print(Text(text))


def _named(case: Case, operator: str) -> tuple[str, ...]:
    return case.id, operator, str(case.H), _lengths(case)


def _training_row(m: Measurement, best: Ceilings) -> tuple[str, ...]:
    named = _named(m.case, m.operator)
    if m.bytes_per_second is None or m.flops_per_second is None:
        return (*named, "failed", *[""] * (len(TRAINING_COLUMNS) - len(named) - 1))
    times = ("" if s is None else f"{s * 1e3:.3f}" for s in (m.forward_seconds, m.backward_seconds, m.seconds))
    return (
        *named, *times, "" if m.peak_bytes is None else f"{m.peak_bytes / 1e6:.0f}",
        f"{m.bytes_per_second / best.copy:.1%}", f"{m.flops_per_second / best.matmul:.1%}",
        f"{m.flops_per_second / 1e12:.4g}", f"{m.case.moved_bytes / 1e6:.1f}", f"{m.case.flops / 1e9:.2f}",
    )  # fmt: skip


def _row(m: Measurement, best: Ceilings) -> tuple[str, ...]:
    case = m.case
    named = _named(case, m.operator)
    if m.seconds is None or m.bytes_per_second is None or m.flops_per_second is None:
        return (*named, "failed", *[""] * 8)
    host, graph = ("" if s is None else f"{s * 1e3:.3f}" for s in (m.host_seconds, m.graph_seconds))
    return (
        *named, f"{m.seconds * 1e3:.3f}", f"{m.bytes_per_second / best.copy:.1%}",
        f"{m.flops_per_second / best.matmul:.1%}", host, graph, f"{m.bytes_per_second / 1e9:.4g}",
        f"{m.flops_per_second / 1e12:.4g}", f"{case.moved_bytes / 1e6:.1f}", f"{case.flops / 1e9:.2f}",
    )  # fmt: skip


def _lengths(case: Case) -> str:
    if len(set(case.lengths)) > 1:
        return f"{case.tokens} in {len(case.lengths)}"
    return str(case.lengths[0]) if len(case.lengths) == 1 else f"{len(case.lengths)} x {case.lengths[0]}"


def _as_json(
    dtype: str, backend: str, device: torch.device, about: str, found: list[Measurement], best: Ceilings
) -> dict[str, Any]:
    return {
        "versions": {**dict(versions()), "cuda": torch.version.cuda}, "device": about, "backend": backend,
        "dtype": dtype, "scaled_down": device.type == "cpu",
        "copy_bytes_per_second": best.copy, "matmul_flops_per_second": best.matmul,
        "bytes_formula": cases.BYTES_FORMULA, "flops_formula": cases.FLOPS_FORMULA,
        "recurrent_flops_formula": cases.RECURRENT_FLOPS_FORMULA,
        "training_bytes_formula": cases.TRAINING_BYTES_FORMULA, "training_flops_formula": cases.TRAINING_FLOPS_FORMULA,
        "runs": measure.CPU_RUNS if device.type == "cpu" else measure.RUNS, "host_runs": measure.HOST_RUNS,
        "measurements": [
            {
                "case": m.case.id, "operator": m.operator, "H": m.case.H, "lengths": m.case.lengths,
                "K": m.case.K, "V": m.case.V, "bytes": m.case.moved_bytes, "flops": m.case.flops,
                "seconds": m.seconds, "host_seconds": m.host_seconds, "graph_seconds": m.graph_seconds,
                "forward_seconds": m.forward_seconds, "backward_seconds": m.backward_seconds,
                "peak_bytes": m.peak_bytes, "error": m.error,
                "bytes_per_second": m.bytes_per_second,
                "share_of_copy": m.bytes_per_second and m.bytes_per_second / best.copy,
                "flops_per_second": m.flops_per_second,
                "share_of_matmul": m.flops_per_second and m.flops_per_second / best.matmul,
            }
            for m in found
        ],
    }  # fmt: skip
