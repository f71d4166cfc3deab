"""What the benchmark's tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kda.cli import main

Bench = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Runs the command on cases, scaled down on the CPU: its exit code and report."""
    file = tmp_path / "bench.json"

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = main(["bench", "--device", "cpu", "--case", *arguments, "--json", str(file)])
        return code, json.loads(file.read_text())

    return run
