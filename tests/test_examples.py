"""The examples run as their docstrings say. Each checks its own result and fails if that is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {path.name: path for path in sorted((ROOT / "examples").glob("*.py"))}

LAST_WORDS = {
    "prove_your_kernel.py": r"L0 failed; first stage that departs: M3 \(kg",
    "serve_with_pool.py": r"all requests agree with one long call each",
    "train_tiny.py": r"the loss fell from [56]\.\d+ to [1-3]\.\d+",
}
"""What each prints in its last line."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_on_its_own(name: str, tmp_path: Path) -> None:
    source = EXAMPLES[name].read_text(encoding="utf-8")
    assert f"python examples/{name}\n" in source.split('"""')[1], "the docstring says how to run it"
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # on a busy machine, threads would mostly wait for each other
    command = [sys.executable, EXAMPLES[name]]
    done = subprocess.run(command, cwd=tmp_path, env=one_thread, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(LAST_WORDS[name], done.stdout.splitlines()[-1])
