"""The options that commands share: read, checked and defaulted in one place, before anything runs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from kda import backends
from kda.backends import environment
from kda.cli.memory import free_memory
from kda.cli.report import is_plain

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The spelling of dtypes in every command."""


MOST = 2**40
"""The largest number that an option takes: of tokens or channels, more than any memory holds."""


class UsageError(Exception):
    """A command can't run as it was asked to; the message is one line."""


def add_backend(parser: argparse.ArgumentParser) -> None:
    """`--backend NAME`; see `backend`."""
    known = ", ".join(("auto", *backends.names()))
    parser.add_argument("--backend", metavar="NAME", help=f"one of {known} (default: $KDA_BACKEND, else auto)")


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device NAME`; see `device`."""
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, npu … (default: cuda, else npu, else cpu)")


def add_dtype(parser: argparse.ArgumentParser, of: str, default: str | None, *names: str) -> None:
    """`--dtype NAME`, one of `names` (all of DTYPES if none are given)."""
    shown = default or "fp32 on the CPU, else bf16"
    parser.add_argument("--dtype", choices=names or tuple(DTYPES), default=default, help=f"{of} (default: {shown})")


def add_files(parser: argparse.ArgumentParser, picture: str) -> None:
    """`--json FILE` and `--plot FILE.png`; see `check_files`."""
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every figure there, in SI units")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help=picture)


def device(args: argparse.Namespace) -> torch.device:
    """The device asked for, or the default; one that holds values, those of the golden (float64) too.

    The default is the CPU where KDA_EMULATE is set; of NPUs it is the one that PyPTO's own variable names.
    """
    name = args.device or _default_device()
    try:
        found = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device: expected the name of a device (cpu, cuda, cuda:1, npu), got {name!r}") from None
    if found.type == "meta":
        raise UsageError("--device: expected a device that holds values, got meta")
    try:
        torch.zeros(1, dtype=torch.float64, device=found).item()
    except Exception as error:  # torch and its plug-ins say it in many ways, ModuleNotFoundError among them
        raise UsageError(f"--device: {name} cannot be used: {first_line(error)}") from None
    return found


def _default_device() -> str:
    if environment.emulating():
        return "cpu"
    name = next((d for d in ("cuda", "npu") if hasattr(torch, d) and getattr(torch, d).is_available()), "cpu")
    return f"npu:{os.environ.get('TILE_FWK_DEVICE_ID', 0)}" if name == "npu" else name


def backend(args: argparse.Namespace) -> str:
    """The backend asked for, by the option or else by the environment, "auto" included; a known name."""
    name, source = args.backend or environment.backend_name(), "--backend" if args.backend else "KDA_BACKEND"
    if name not in (known := ("auto", *backends.names())):
        raise UsageError(f"{source}: expected one of {', '.join(known)}, got {name!r}")
    return name


def usable_backend(args: argparse.Namespace, on: torch.device) -> str:
    """As `backend`; "auto" is that of the device, and whichever it is can run on this machine."""
    name = backend(args)
    if name == "auto":
        name = backends.for_device(on.type)
    if reasons := backends.unusable(name):
        raise UsageError(f"backend {name} cannot be used: {'; '.join(reasons)}")
    return name


def check_files(args: argparse.Namespace) -> None:
    """Can the files asked for be written?"""
    for name, file in (("--json", args.json), ("--plot", args.plot), ("--report", getattr(args, "report", None))):
        if file is None:
            continue
        if not file.parent.is_dir():
            raise UsageError(f"{name}: expected a file in a folder that exists, got {file}")
        places = [file if file.exists() else file.parent]
        if name == "--json" and is_plain(file):
            places.append(file.parent)
        if file.is_dir() or not all(os.access(place, os.W_OK) for place in places):
            raise UsageError(f"{name}: expected a file that can be written, got {file}")
    if args.plot is None:
        return
    if args.plot.suffix != ".png":
        raise UsageError(f"--plot: expected a name that ends in .png, got {args.plot}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--plot: needs matplotlib (the extra `plot`), which is not installed") from None
    except ValueError as error:  # of $MPLBACKEND or its own file of settings
        raise UsageError(f"--plot: matplotlib cannot be imported: {first_line(error)}") from None


def check_environment() -> None:
    """Can the variables of the package be read?"""
    try:
        environment.emulating()
        environment.checking()
    except ValueError as error:
        raise UsageError(str(error)) from None


def check_memory(device: torch.device, needed: int, remedy: str) -> None:
    """Has the device that many bytes free, as far as it tells? The remedy says which options take less."""
    if (free := free_memory(device)) is not None and free < needed:
        sizes = f"{needed / 2**30:,.0f} GiB of free memory on {device.type}, has {free / 2**30:,.0f}"
        raise UsageError(f"needs about {sizes}: {remedy}")


def positive_int(text: str) -> int:
    """A number from 1 to `MOST`, for argparse's `type`."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    if number > MOST:
        raise argparse.ArgumentTypeError(f"expected at most {MOST}, got {text}")
    return number


def first_line(error: Exception) -> str:
    """What an exception of torch says before it goes into its own details."""
    return str(error).partition("\n")[0]
