"""`python -m kda info`: what is installed, what this machine has, and which backend a call would take."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from collections.abc import Sequence

import torch
from rich.console import Console

import kda
from kda import backends
from kda.backends import environment
from kda.backends.call import OPS
from kda.cli.console import open_console, show_facts

_DISTRIBUTIONS = ("tilelang", "pypto", "torch_npu", "flash-linear-attention")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`info` takes no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print the report and return 0."""
    show(open_console())
    return 0


def show(console: Console) -> None:
    """Print the report."""
    status, here = backends.status(), devices()
    types = dict.fromkeys(name.partition(":")[0] for name, _ in here)
    _section(console, "Versions", versions())
    _section(console, "Devices", here)
    variables = [(name, os.environ.get(name, "(unset)"), what) for name, what in environment.VARIABLES.items()]
    _section(console, "Environment variables", variables)
    _section(console, "Backends", [(name, *_usable(reasons)) for name, reasons in status.items()])
    _section(console, "What they keep on disk", caches())
    _section(console, "Who computes their gradients", [(name, *gradients(name)) for name in status])
    _section(console, "About them", [(name, backends.load(name).about) for name in status])
    _section(console, "backend=auto takes", [(auto_choice(t, status), f"for tensors on {t}") for t in types])


def versions() -> list[tuple[str, str]]:
    """(name, version) of Python, kda, torch and what backends and comparisons use; no framework is imported for it."""
    found = [("python", platform.python_version()), ("kda", kda.__version__), ("torch", torch.__version__)]
    for name in _DISTRIBUTIONS:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append((name, "not installed"))
    for name in backends.names():
        if (others := getattr(backends.load(name), "versions", None)) is not None:
            found += others()
    return found


def caches() -> list[tuple[str, str, str]]:
    """(backend, how much it keeps, where) of those that keep what they compile."""
    found = []
    for name in backends.names():
        if (measure := getattr(backends.load(name), "cache", None)) is not None:
            kept = measure()
            found.append((name, f"{kept.files} files, {kept.size / 2**20:.1f} MiB", f"{kept.folder} ({kept.variable})"))
    return found


def gradients(backend: str) -> list[str]:
    """Who computes the gradient of each operator of a backend."""
    loaded = backends.load(backend)
    if loaded.differentiable:
        return ["autograd, from its operations"]
    own = {op: hasattr(loaded, f"{op}_backward") for op in OPS}
    return [f"{op}: " + ("a backward pass of its own" if own[op] else "the backend torch, anew") for op in OPS]


def devices() -> list[tuple[str, str]]:
    """(torch device, description) of everything tensors can live on here."""
    found = [("cpu", f"{platform.machine()}, {torch.get_num_threads()} threads")]
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        memory = f"{card.total_memory / 2**30:.0f} GiB"
        found.append((f"cuda:{i}", f"{card.name}, compute capability {card.major}.{card.minor}, {memory}"))
    if (npu := getattr(torch, "npu", None)) is not None:  # once torch_npu is installed: torch loads it by itself
        found += [(f"npu:{i}", npu.get_device_name(i)) for i in range(npu.device_count())]
    return found


def described(device: torch.device) -> str:
    """The description of one of them."""
    index = "" if device.type == "cpu" else f":{device.index or 0}"
    return dict(devices())[device.type + index]


def auto_choice(device_type: str, status: dict[str, list[str]]) -> str:
    """The backend that `auto` takes for calls on this type of device, as far as it can take the call at hand."""
    first = backends.for_device(device_type)
    return "torch" if status[first] else first


def _usable(reasons: list[str]) -> tuple[str, str]:
    return ("not usable here", "; ".join(reasons)) if reasons else ("usable here", "")


def _section(console: Console, title: str, rows: Sequence[tuple[str, ...]]) -> None:
    console.print(f"[bold]{title}[/]")
    show_facts(console, rows)
