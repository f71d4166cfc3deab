"""`python -m kda info`: what is installed, what this machine has, and which backend a call would take."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform

import torch
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column, Table

import kda
from kda import backends

_DISTRIBUTIONS = ("tilelang", "pypto", "torch_npu", "flash-linear-attention")
_ENVIRONMENT = {
    "KDA_BACKEND": "auto (default), tilelang, pypto or torch; the argument backend= wins over it",
    "KDA_EMULATE": "1: let backend=tilelang and backend=pypto run their kernels on CPU tensors, slowly",
    "KDA_CHECK": "1: also check argument values (cu_seqlens order, g <= 0, finite inputs)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`info` takes no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print the report and return 0."""
    console = Console(highlight=False)
    status, here = backends.status(), devices()
    types = dict.fromkeys(name.partition(":")[0] for name, _ in here)
    _section(console, "Versions", versions())
    _section(console, "Devices", here)
    environment = [(name, os.environ.get(name, "(unset)"), meaning) for name, meaning in _ENVIRONMENT.items()]
    _section(console, "Environment variables", environment)
    _section(console, "Backends", [(name, *_usable(reasons)) for name, reasons in status.items()])
    _section(console, "About them", [(name, backends.load(name).about) for name in status])
    _section(console, "backend=auto takes", [(auto_choice(t, status), f"for tensors on {t}") for t in types])
    return 0


def versions() -> list[tuple[str, str]]:
    """(name, version) of Python, kda, torch and what backends and comparisons use; nothing is imported for it."""
    found = [("python", platform.python_version()), ("kda", kda.__version__), ("torch", torch.__version__)]
    for name in _DISTRIBUTIONS:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append((name, "not installed"))
    return found


def devices() -> list[tuple[str, str]]:
    """(torch device, description) of everything tensors can live on here."""
    found = [("cpu", f"{platform.machine()}, {torch.get_num_threads()} threads")]
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        memory = f"{card.total_memory / 2**30:.0f} GiB"
        found.append((f"cuda:{i}", f"{card.name}, compute capability {card.major}.{card.minor}, {memory}"))
    npu = getattr(torch, "npu", None)  # there once torch_npu is installed: torch loads it by itself
    for i in range(npu.device_count() if npu else 0):
        found.append((f"npu:{i}", npu.get_device_name(i)))
    return found


def auto_choice(device_type: str, status: dict[str, list[str]]) -> str:
    """The backend that `auto` takes for calls on this type of device, as far as it can take the call at hand."""
    first = backends.for_device(device_type)
    return "torch" if status[first] else first


def _usable(reasons: list[str]) -> tuple[str, str]:
    return ("not usable here", "; ".join(reasons)) if reasons else ("usable here", "")


def _section(console: Console, title: str, rows: list[tuple[str, ...]]) -> None:
    table = Table.grid(*(Column(overflow="fold") for _ in rows[0]), padding=(0, 2))
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(f"[bold]{title}[/]", Padding(table, (0, 0, 1, 2)))
