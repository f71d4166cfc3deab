"""`python -m kda bench --model`: the cases in a performance model of the backend, without a device."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from kda import backends
from kda.backends.call import KdaCall, Op
from kda.bench.cases import CASES, TRAINING, Case, Decode
from kda.checks import checked
from kda.cli import options
from kda.cli.console import Column, open_console, progress_bar, say, show_table
from kda.cli.info import versions
from kda.cli.options import UsageError
from kda.cli.report import write_report

SMALL: dict[str, Case] = {
    case.id: case
    for case in (
        Case("H1-T512", 1, (512,)), Case("H8-T1024", 8, (1024,)), CASES["T1024"], Case("H32-T4096", 32, (4096,)),
        CASES["B16"],
    )
}  # fmt: skip
"""The cases unless others are named: what a model runs in minutes, from few heads to many."""

KNOWN = SMALL | {id: case for id, case in CASES.items() if id not in TRAINING}
Found = dict[str, tuple[Case, Any]]
"""Case and model of each case that has one, by the case's name."""

COLUMNS = (
    Column("case"), Column("H"), Column("T"), Column("Mcycles", number=True), Column("ms", number=True),
    Column("tasks", number=True), Column("workspace MB", number=True),
    Column("cube ms", number=True), Column("memory ms", number=True),
)  # fmt: skip
STAGE_COLUMNS = (
    Column("case"), Column("stage"),
    *(Column(title, number=True) for title in ("products", "M 16-bit", "M fp32", "vector", "copies", "KB in", "KB out"))
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Model every case; 0 if that worked, 1 if not. Raises UsageError before anything runs."""
    if unknown := [id for id in args.cases or () if id not in KNOWN]:
        raise UsageError(f"--case: unknown {', '.join(unknown)}; known with --model: {', '.join(KNOWN)}")
    options.check_files(args)
    name = options.backend(args)
    name = backends.for_device("npu") if name == "auto" else name
    make = getattr(backends.load(name), "model", None)
    if make is None:
        raise UsageError(f"--model: backend {name} has no performance model")
    console = open_console()
    say(console, ", ".join(f"{name} {version}" for name, version in versions()))
    say(console, f"a performance model of backend {name}, {args.dtype}; nothing runs on a device")
    found: Found = {}
    errors: dict[str, str] = {}
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(args.cases or SMALL))
        for id in args.cases or SMALL:
            progress.update(task, description=id)
            try:
                found[id] = KNOWN[id], of(KNOWN[id], options.DTYPES[args.dtype], make)
            except RuntimeError as error:  # one case's failure must not cost the other rows
                errors[id] = str(error)
            if args.json:
                write_report(args.json, _as_json(name, args.dtype, found, errors), complete=False)
            progress.advance(task)
    if found:
        show(console, found)
    for id, text in errors.items():
        console.print(Text(f"{id}: {text}"))
    if args.json:
        write_report(args.json, _as_json(name, args.dtype, found, errors))
    if args.plot and found:
        draw(found, args.plot, f"{name}, {args.dtype}, in its performance model")
    return 1 if errors else 0


def of(case: Case, dtype: torch.dtype, make: Callable[[KdaCall], Any]) -> Any:
    """The model of a case, as a backend's `model` makes it. Raises RuntimeError where that fails."""
    op: Op = "fused_recurrent_kda" if isinstance(case, Decode) else "chunk_kda"
    return make(checked(op, **case.inputs(torch.device("cpu"), dtype)))


def show(console: Console, found: Found) -> None:
    """Print both tables and what they are."""
    rows = [
        (id, str(case.H), str(case.tokens), f"{model.cycles / 1e6:.3f}", f"{model.seconds * 1e3:.3f}",
         f"{model.tasks / model.units:.1f}", f"{model.workspace / 1e6:.0f}", f"{model.cube_seconds * 1e3:.3f}",
         f"{model.memory_seconds * 1e3:.3f}")
        for id, (case, model) in found.items()
    ]  # fmt: skip
    show_table(console, COLUMNS, rows)
    stages = []
    for id, (_, model) in found.items():
        for stage, counts in [*model.stages.items(), ("all", model.total)]:
            per_unit = (
                counts.matmuls, counts.products_16 / 1e6, counts.products_32 / 1e6, counts.vector_ops, counts.copies,
                counts.read / 1024, counts.written / 1024,
            )  # fmt: skip
            stages.append((id, stage, *(f"{x / model.units:.1f}" for x in per_unit)))
    show_table(console, STAGE_COLUMNS, stages)
    _, model = next(iter(found.values()))
    say(console, "tasks, and everything in the second table: of one head and chunk, in decoding of one head and token")
    say(console, "cube ms, memory ms: what products and traffic take at least on an Ascend 910B2, the products at the "
                 "cube's measured fp32 rate, the traffic if nothing stayed in the L2 cache")  # fmt: skip
    console.print(Text(model.about))


def _as_json(name: str, dtype: str, found: Found, errors: dict[str, str]) -> dict[str, Any]:
    return {
        "versions": dict(versions()), "backend": name, "dtype": dtype, "errors": errors,
        "models": [
            {
                "case": id, "H": case.H, "lengths": case.lengths, "cycles": model.cycles, "seconds": model.seconds,
                "tasks": model.tasks, "units": model.units, "workspace": model.workspace,
                "cube_seconds": model.cube_seconds, "memory_seconds": model.memory_seconds,
                "stages": {stage: dataclasses.asdict(counts) for stage, counts in model.stages.items()},
            }
            for id, (case, model) in found.items()
        ],
    }  # fmt: skip


def draw(found: Found, path: Path, title: str) -> None:
    """Write a picture: each case's traffic and products of one head and chunk, by stage."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    stages = list(dict.fromkeys(stage for _, model in found.values() for stage in model.stages))
    figure, panels = plt.subplots(1, 2, figsize=(12, 1.5 + 0.5 * len(found)), layout="constrained", sharey=True)
    for axes, names, unit, label in (
        (panels[0], ("read", "written"), 2**20, "MiB to and from global memory"),
        (panels[1], ("products_16", "products_32"), 1e6, "million multiplications in the cube"),
    ):
        left = [0.0] * len(found)
        for stage in stages:
            widths = [
                sum(getattr(model.stages.get(stage), name, 0) for name in names) / unit / model.units
                for _, model in found.values()
            ]
            axes.barh(list(found), widths, left=left, label=stage)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_xlabel(f"{label}, a head and chunk (in decoding a token)")
    panels[0].invert_yaxis()
    figure.suptitle(title)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
