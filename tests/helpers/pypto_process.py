"""One process for every test that runs a PyPTO kernel: what PyPTO keeps in a process can spoil the kernels after it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RUN = """
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("checks_of_pypto", {file!r})
module = module_from_spec(spec)
spec.loader.exec_module(module)
module.{name}.__wrapped__(**{arguments!r})
"""


def in_its_own_process(check: Callable[..., None]) -> Callable[..., None]:
    """The test that runs `check`, a function of a test module with literal arguments, with KDA_EMULATE=1.

    It is skipped where the kernels cannot run.
    """

    @functools.wraps(check)
    def test(**arguments: object) -> None:
        from kda.backends.pypto.detect import missing_interpreter, missing_pypto

        if reason := missing_pypto() or missing_interpreter():
            pytest.skip(reason)
        code = RUN.format(file=check.__code__.co_filename, name=check.__name__, arguments=arguments)
        environment = os.environ | {
            "KDA_EMULATE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parent),
        }
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"

    return test
