"""`python -m kda demo [FILE]`: a real text through a KDA layer, prefilled and decoded, checked in three ways."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from torch import Tensor

from kda import backends
from kda.golden import recurrent_kda_golden, rel_rmse
from kda.nn import KimiDeltaAttention, KimiDeltaCache
from kda.normalise import normalise

HIDDEN_SIZE, NUM_HEADS, HEAD_DIM, SEED = 512, 4, 128, 0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_REL_RMSE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}

INTRO = """\
A KDA layer reads a text with a memory of fixed size, its state. Its weights are
random here: this is about the arithmetic. Three ways to one answer must agree:
  one run           chunk_kda over the whole text at once
  prefill + decode  chunk_kda over its first part, then fused_recurrent_kda
                    byte by byte from the state left behind, as in generation
  golden            the paper's recurrence, token by token, in float64
"""

Result = TypeVar("Result")


class Timing(NamedTuple):
    """One pass over (part of) the text."""

    name: str
    op: str
    backend: str
    tokens: int
    seconds: float


class Agreement(NamedTuple):
    """How far two ways to the same tensor lie apart."""

    way: str
    against: str
    tensor: str
    max_error: float
    rel_rmse: float

    def within(self, limit: float) -> bool:
        return self.rel_rmse <= limit  # never true of a NaN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `demo`."""
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="text (default: one in Python itself)")
    for name, default in (("--prefill", 4096), ("--decode", 256)):
        text = f"bytes to {name[2:]} (default: {default})"
        parser.add_argument(name, type=positive_int, default=default, metavar="N", help=text)
    parser.add_argument("--backend", choices=("auto", *backends.NAMES), help="default: KDA_BACKEND, else auto")
    parser.add_argument("--device", help="default: cuda, else npu, else cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on the CPU, else bfloat16")


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns 0 if all ways agree, 1 if they don't, 2 if it can't start."""
    try:
        path = args.file or default_text()
        text = read_text(path, args.prefill, args.decode)
        device = torch.device(args.device or _default_device())
        dtype = DTYPES[args.dtype] if args.dtype else (torch.float32 if device.type == "cpu" else torch.bfloat16)
        layer, x = (part.to(device, dtype) for part in build(text, args.backend))
        used = backends_used(layer, x)
    except (OSError, ValueError, RuntimeError, AssertionError) as error:  # torch lacks the device: the last two
        print(f"kda demo: error: {error}", file=sys.stderr)
        return 2

    console = Console(highlight=False)
    console.print(f"[bold]Kimi Delta Attention on real text[/]\n\n{INTRO}")
    facts = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2, 0, 0))
    facts.add_row("Text", escape(str(path)))
    facts.add_row("Bytes", f"{args.prefill:,} to prefill and {args.decode:,} to decode, of {path.stat().st_size:,}")
    facts.add_row("Layer", f"hidden size {HIDDEN_SIZE}, {NUM_HEADS} heads of {HEAD_DIM}, seed {SEED}")
    threads = f", {torch.get_num_threads()} threads (1 to decode)" if device.type == "cpu" else ""
    facts.add_row("Device", f"{device}, {str(dtype).removeprefix('torch.')}{threads}")
    facts.add_row("Backend", escape(_why(used["chunk_kda"], args.backend, layer, x)))
    facts.add_row("State", _state_size(len(text), dtype))
    console.print(facts, "")

    with console.status("computing all three ways ..."):
        timings, agreements = measure(layer, x, args.prefill, used)
    limit = MAX_REL_RMSE[dtype]
    console.print(timing_table(timings))
    console.print(agreement_table(agreements, limit))
    wrong, total = sum(not a.within(limit) for a in agreements), len(agreements)
    if wrong:
        console.print(f"[bold red]FAILED[/]: {wrong} of {total} comparisons exceed a relative RMSE of {limit:g}.")
        return 1
    console.print(f"[bold green]OK[/]: all {total} comparisons agree within a relative RMSE of {limit:g}.")
    return 0


def positive_int(text: str) -> int:
    """A command-line number of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return number


def default_text() -> Path:
    """A long English text that comes with every Python: the source of `help()`'s topics."""
    spec = importlib.util.find_spec("pydoc_data.topics")
    if spec is None or not spec.has_location:
        raise ValueError("this Python ships without pydoc_data/topics.py: name a FILE")
    return Path(spec.origin)


def read_text(path: Path, prefill: int, decode: int) -> bytes:
    """The first `prefill + decode` bytes of a file. Raises OSError (can't be read) or ValueError (too short)."""
    needed = prefill + decode
    with path.open("rb") as file:
        text = file.read(needed)
    if len(text) < needed:
        raise ValueError(
            f"{path} has {len(text):,} bytes, but {needed:,} are needed ({prefill:,} to prefill and {decode:,} to "
            "decode): name a longer FILE, or lower --prefill and --decode"
        )
    return text


def build(text: bytes, backend: str | None) -> tuple[KimiDeltaAttention, Tensor]:
    """The seeded layer, and the text's bytes in a seeded embedding, `[1, len(text), HIDDEN_SIZE]`."""
    torch.manual_seed(SEED)
    embedding = torch.randn(256, HIDDEN_SIZE)
    layer = KimiDeltaAttention(HIDDEN_SIZE, NUM_HEADS, HEAD_DIM, backend=backend).requires_grad_(False)
    return layer, embedding[torch.tensor(list(text))][None]


def backends_used(layer: KimiDeltaAttention, x: Tensor) -> dict[str, str]:
    """Operator -> name of the backend that takes its calls. Raises NotImplementedError if a named backend can't."""
    inputs, _ = layer.operator_inputs(x[:, :1])
    calls = (normalise(op, **inputs, output_final_state=True) for op in ("chunk_kda", "fused_recurrent_kda"))
    return {call.op: backends.select(call, layer.backend).__name__.rpartition(".")[2] for call in calls}


def measure(
    layer: KimiDeltaAttention, x: Tensor, prefill: int, used: dict[str, str]
) -> tuple[list[Timing], list[Agreement]]:
    """Send x `[1, T, hidden_size]` through the layer in all three ways; `used` as from `backends_used`."""
    outputs: list[Tensor] = []  # the operators' o, picked up where the layer hands it to its norm
    hook = layer.o_norm.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    _, cache = layer(x[:, :64], output_cache=True)  # warm up: the first calls may compile kernels
    decode(layer, x[:, :1], cache)
    outputs.clear()

    (y_one, cache_one), seconds_one = _timed(x.device, lambda: layer(x, output_cache=True))
    o_one = outputs.pop()
    (y_prefill, cache), seconds_prefill = _timed(x.device, lambda: layer(x[:, :prefill], output_cache=True))
    (y_decode, cache), seconds_decode = _timed(x.device, lambda: decode(layer, x[:, prefill:], cache))
    hook.remove()
    y, o = torch.cat([y_prefill, y_decode], dim=1), torch.cat(outputs, dim=1)

    inputs, _ = layer.operator_inputs(x)
    (o_golden, state_golden), seconds_golden = _timed(
        x.device, lambda: recurrent_kda_golden(**inputs, output_final_state=True)
    )

    length, chunk, recurrent = x.shape[1], "chunk_kda", "fused_recurrent_kda"
    timings = [
        Timing("one run", chunk, used[chunk], length, seconds_one),
        Timing("prefill", chunk, used[chunk], prefill, seconds_prefill),
        Timing("decode", recurrent, used[recurrent], length - prefill, seconds_decode),
        Timing("golden", "float64 recurrence", "-", length, seconds_golden),
    ]
    two = "prefill + decode"
    agreements = [
        _agreement(two, "one run", "layer output", y, y_one),
        _agreement(two, "golden", "operator output", o, o_golden),
        _agreement(two, "golden", "final state", cache.state, state_golden),
        _agreement("one run", "golden", "operator output", o_one, o_golden),
        _agreement("one run", "golden", "final state", cache_one.state, state_golden),
    ]
    return timings, agreements


def decode(layer: KimiDeltaAttention, x: Tensor, cache: KimiDeltaCache) -> tuple[Tensor, KimiDeltaCache]:
    """Continue `cache` with x token by token, as a model does that generates them."""
    threads, ys = torch.get_num_threads(), []
    torch.set_num_threads(1)  # one token is too little to share: on a busy machine the threads wait for each other
    for token in x.split(1, dim=1):
        y, cache = layer(token, cache, output_cache=True)
        ys.append(y)
    torch.set_num_threads(threads)
    return torch.cat(ys, dim=1), cache


def timing_table(timings: list[Timing]) -> Table:
    """The passes with their speed."""
    table = _table("Time", ("pass", "operator", "backend"), ("tokens", "seconds", "tokens/s"))
    for t in timings:
        table.add_row(t.name, t.op, t.backend, f"{t.tokens:,}", f"{t.seconds:.3f}", f"{t.tokens / t.seconds:,.0f}")
    return table


def agreement_table(agreements: list[Agreement], limit: float) -> Table:
    """The comparisons, each ok if its relative RMSE is at most `limit`."""
    table = _table("Agreement", ("way", "against", "tensor"), ("max |error|", "rel. RMSE", ""))
    for a in agreements:
        verdict = "[green]ok[/]" if a.within(limit) else "[bold red]FAILED[/]"
        table.add_row(a.way, a.against, a.tensor, f"{a.max_error:.1e}", f"{a.rel_rmse:.1e}", verdict)
    return table


def _table(title: str, words: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    columns = [Column(header, overflow="fold") for header in words]
    columns += [Column(header, overflow="fold", justify="right") for header in numbers]
    return Table(*columns, box=box.SIMPLE_HEAD, title=title, title_justify="left")


def _agreement(way: str, against: str, tensor: str, actual: Tensor, expected: Tensor) -> Agreement:
    actual, expected = actual.double(), expected.double()
    return Agreement(way, against, tensor, (actual - expected).abs().max().item(), rel_rmse(actual, expected))


def _timed(device: torch.device, work: Callable[[], Result]) -> tuple[Result, float]:
    synchronize = getattr(torch, device.type).synchronize
    synchronize()
    start = time.perf_counter()
    result = work()
    synchronize()
    return result, time.perf_counter() - start


def _default_device() -> str:
    return next((d for d in ("cuda", "npu") if hasattr(torch, d) and getattr(torch, d).is_available()), "cpu")


def _why(used: str, argument: str | None, layer: KimiDeltaAttention, x: Tensor) -> str:
    asked = argument or os.environ.get("KDA_BACKEND") or "auto"
    if asked != "auto":
        return f"{used}, as {'--backend' if argument else 'KDA_BACKEND'} says"
    first = backends.for_device(x.device.type)
    if used == first:
        return f"{used}, which auto takes for {x.device.type} tensors (kda info lists them all)"
    return f"{used}, because {first} cannot take the call (kda info says why)"


def _state_size(tokens: int, dtype: torch.dtype) -> str:
    state = NUM_HEADS * HEAD_DIM * HEAD_DIM * 4
    key_values = 2 * tokens * NUM_HEADS * HEAD_DIM * dtype.itemsize
    return f"{state / 2**10:,.0f} KiB, however long the text; keys and values would take {key_values / 2**10:,.0f} KiB"
