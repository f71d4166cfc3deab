"""`python -m kda demo [FILE]`: a real text through a KDA layer, prefilled and decoded, checked in three ways."""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from rich.console import Console
from torch import Tensor

from kda import backends
from kda.backends.call import OPS
from kda.checks import checked
from kda.cli import options
from kda.cli.console import Column, open_console, show_facts, show_table, working
from kda.cli.options import UsageError
from kda.golden import recurrent_kda_golden, rel_rmse
from kda.nn import KimiDeltaAttention, KimiDeltaCache

HIDDEN_SIZE, NUM_HEADS, HEAD_DIM, SEED = 512, 4, 128, 0
BYTES_PER_TOKEN = 1 << 16
"""Of memory, about what all three ways take in fp32."""
MAX_REL_RMSE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}

INTRO = (
    "A KDA layer reads a text with a memory of fixed size, its state. Its weights are random here: this is about the "
    "arithmetic. Three ways to one answer must agree:"
)
WAYS = (
    ("one run", "chunk_kda over the whole text at once"),
    ("prefill + decode", "chunk_kda over its first part, then fused_recurrent_kda byte by byte from the state left "
                         "behind, as in generation"),
    ("golden", "the paper's recurrence, token by token, in float64"),
)  # fmt: skip

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
        parser.add_argument(name, type=options.positive_int, default=default, metavar="N", help=text)
    options.add_backend(parser)
    options.add_device(parser)
    options.add_dtype(parser, "of the layer", None)


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns 0 if all ways agree, 1 if they don't. Raises UsageError if it can't start."""
    asked, device = options.backend(args), options.device(args)
    dtype = options.DTYPES[args.dtype or ("fp32" if device.type == "cpu" else "bf16")]
    options.check_memory(device, (args.prefill + args.decode) * BYTES_PER_TOKEN, "lower --prefill and --decode")
    try:
        path = args.file or default_text()
        text = read_text(path, args.prefill, args.decode)
        layer, x = build(text, asked, device, dtype)
        used = backends_used(layer, x)
    except (OSError, ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from None

    console = open_console()
    threads = f", {torch.get_num_threads()} threads (1 to decode)" if device.type == "cpu" else ""
    console.print("[bold]Kimi Delta Attention on real text[/]\n", INTRO, sep="\n")
    show_facts(console, WAYS)
    show_facts(console, (
        ("Text", str(path)),
        ("Bytes", f"{args.prefill:,} to prefill and {args.decode:,} to decode" + _of(path)),
        ("Layer", f"hidden size {HIDDEN_SIZE}, {NUM_HEADS} heads of {HEAD_DIM}, seed {SEED}"),
        ("Device", f"{device}, {str(dtype).removeprefix('torch.')}{threads}"),
        ("Backend", _why(used["chunk_kda"], asked, device)),
        ("State", _state_size(len(text), dtype)),
    ))  # fmt: skip

    timings: list[Timing] = []
    try:
        with working(console, "computing all three ways ..."):
            agreements = measure(layer, x, args.prefill, used, timings)
    finally:  # also what there is when the run is ended early
        if timings:
            show_timings(console, timings)
    limit = MAX_REL_RMSE[dtype]
    show_agreements(console, agreements, limit)
    wrong, total = sum(not a.within(limit) for a in agreements), len(agreements)
    if wrong:
        console.print(f"[bold red]FAILED[/]: {wrong} of {total} comparisons exceed a relative RMSE of {limit:g}.")
        return 1
    console.print(f"[bold green]OK[/]: all {total} comparisons agree within a relative RMSE of {limit:g}.")
    return 0


def default_text() -> Path:
    """A long English text that comes with every Python: the source of `help()`'s topics."""
    try:
        spec = importlib.util.find_spec("pydoc_data.topics")
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.has_location or spec.origin is None:
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


def build(text: bytes, backend: str, device: torch.device, dtype: torch.dtype) -> tuple[KimiDeltaAttention, Tensor]:
    """The seeded layer, and the text's bytes in a seeded embedding, `[1, len(text), HIDDEN_SIZE]`."""
    torch.manual_seed(SEED)
    embedding = torch.randn(256, HIDDEN_SIZE)
    layer = KimiDeltaAttention(HIDDEN_SIZE, NUM_HEADS, HEAD_DIM, backend=backend).requires_grad_(False)
    return layer.to(device, dtype), embedding[torch.tensor(list(text))][None].to(device, dtype)


def backends_used(layer: KimiDeltaAttention, x: Tensor) -> dict[str, str]:
    """Operator -> name of the backend that takes its calls. Raises NotImplementedError if a named backend can't."""
    inputs, _ = layer.operator_inputs(x[:, :1])
    calls = (checked(op, **inputs, output_final_state=True) for op in OPS)
    return {call.op: backends.select(call, layer.backend) for call in calls}


def measure(
    layer: KimiDeltaAttention, x: Tensor, prefill: int, used: dict[str, str], timings: list[Timing]
) -> list[Agreement]:
    """Send x `[1, T, hidden_size]` through the layer in all three ways; `used` as from `backends_used`.

    Each pass goes into `timings` as it ends.
    """
    outputs: list[Tensor] = []  # the operators' o, picked up where the layer hands it to its norm
    hook = layer.o_norm.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    _, cache = layer(x[:, :64], output_cache=True)  # warm up: the first calls may compile kernels
    decode(layer, x[:, :1], cache)
    outputs.clear()

    length, chunk, recurrent = x.shape[1], "chunk_kda", "fused_recurrent_kda"

    def timed(name: str, op: str, tokens: int, work: Callable[[], Result]) -> Result:
        result, seconds = _timed(x.device, work)
        timings.append(Timing(name, op, used.get(op, "-"), tokens, seconds))
        return result

    y_one, cache_one = timed("one run", chunk, length, lambda: layer(x, output_cache=True))
    o_one = outputs.pop()
    y_prefill, cache = timed("prefill", chunk, prefill, lambda: layer(x[:, :prefill], output_cache=True))
    y_decode, cache = timed("decode", recurrent, length - prefill, lambda: decode(layer, x[:, prefill:], cache))
    hook.remove()
    y, o = torch.cat([y_prefill, y_decode], dim=1), torch.cat(outputs, dim=1)

    inputs, _ = layer.operator_inputs(x)
    o_golden, state_golden = timed(
        "golden", "float64 recurrence", length, lambda: recurrent_kda_golden(**inputs, output_final_state=True)
    )
    assert state_golden is not None

    two = "prefill + decode"
    return [
        _agreement(two, "one run", "layer output", y, y_one),
        _agreement(two, "golden", "operator output", o, o_golden),
        _agreement(two, "golden", "final state", cache.state, state_golden),
        _agreement("one run", "golden", "operator output", o_one, o_golden),
        _agreement("one run", "golden", "final state", cache_one.state, state_golden),
    ]


def decode(layer: KimiDeltaAttention, x: Tensor, cache: KimiDeltaCache) -> tuple[Tensor, KimiDeltaCache]:
    """Continue `cache` with x token by token, as a model does that generates them."""
    threads, ys = torch.get_num_threads(), []
    torch.set_num_threads(1)  # one token is too little to share: on a busy machine the threads wait for each other
    try:
        for token in x.split(1, dim=1):
            y, cache = layer(token, cache, output_cache=True)
            ys.append(y)
    finally:
        torch.set_num_threads(threads)
    return torch.cat(ys, dim=1), cache


def show_timings(console: Console, timings: list[Timing]) -> None:
    """Print the passes with their speed."""
    columns = [Column("pass"), Column("operator", needed=False), Column("backend", needed=False)]
    columns += [Column(title, number=True) for title in ("tokens", "seconds", "tokens/s")]
    rows = [
        (t.name, t.op, t.backend, f"{t.tokens:,}", f"{t.seconds:.3f}", f"{t.tokens / t.seconds:,.0f}") for t in timings
    ]
    show_table(console, columns, rows, title="Time")


def show_agreements(console: Console, agreements: list[Agreement], limit: float) -> None:
    """Print the comparisons, each ok if its relative RMSE is at most `limit`."""
    columns = [Column(title) for title in ("way", "against", "tensor")]
    columns += [Column("max |error|", number=True, needed=False), Column("rel. RMSE", number=True), Column("")]
    rows = [
        (a.way, a.against, a.tensor, f"{a.max_error:.1e}", f"{a.rel_rmse:.1e}",
         "[green]ok[/]" if a.within(limit) else "[bold red]FAILED[/]")
        for a in agreements
    ]  # fmt: skip
    show_table(console, columns, rows, title="Agreement")


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


def _of(path: Path) -> str:
    """How long the text is, if it has an end."""
    return f", of {path.stat().st_size:,}" if path.is_file() else ""


def _why(used: str, asked: str, device: torch.device) -> str:
    if asked != "auto":
        return f"{used}, as asked for"
    first = backends.for_device(device.type)
    if used == first:
        return f"{used}, which auto takes for {device.type} tensors (kda info lists them all)"
    return f"{used}, because {first} cannot take the call (kda info says why)"


def _state_size(tokens: int, dtype: torch.dtype) -> str:
    state = NUM_HEADS * HEAD_DIM * HEAD_DIM * 4
    key_values = 2 * tokens * NUM_HEADS * HEAD_DIM * dtype.itemsize
    return f"{state / 2**10:,.0f} KiB, however long the text; keys and values would take {key_values / 2**10:,.0f} KiB"
