"""The command line: `python -m kda` (or `kda`) with info, demo, gate, ladder or bench."""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Sequence

import kda
from kda.cli import options
from kda.cli.ending import exit_code
from kda.cli.letters import spell_out

COMMANDS = {
    "info": ("kda.cli.info", "versions, devices, and which backends can run here"),
    "demo": ("kda.cli.demo", "send a real text through a KDA layer and check every path against the golden"),
    "gate": ("kda.gates.command", "hold a backend to the golden over the case table"),
    "ladder": ("kda.ladder.command", "from linear attention to KDA in five levels: check, count and time them"),
    "bench": ("kda.bench.command", "time a backend against the machine's copy bandwidth and matmul rate"),
}
"""Command -> its module, with `add_arguments(parser)` and `run(args) -> exit code`, and its line of help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 good, 1 the command found something wrong, 2 it could not run.

    130 after Ctrl-C, 143 after SIGTERM, each with what was found until then; 141 where the output's reader has gone.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):
        spell_out(stream)
    return exit_code(" ".join(["kda", *argv[:1]]), functools.partial(_run, argv))


def _run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="kda", description="Kimi Delta Attention operators: see what runs, check it.")
    parser.add_argument("--version", action="version", version=f"kda {kda.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module_name, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if argv[:1] == [name]:  # the other commands' modules stay unimported
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    options.check_environment()
    return args.run(args)
