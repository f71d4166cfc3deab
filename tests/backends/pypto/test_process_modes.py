"""The PyPTO backend, through the interpreter, under torch's defaults and modes: the first calls of a process."""

from __future__ import annotations

import process_modes
import pytest
from pypto_process import in_its_own_process


@pytest.mark.parametrize("mode", process_modes.MODES)
@in_its_own_process
def test_calls_work_under_it_and_after_it(mode: str) -> None:
    process_modes.check(mode, "pypto")
