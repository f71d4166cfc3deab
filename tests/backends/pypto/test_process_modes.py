"""The PyPTO backend, through the interpreter, under torch's defaults and modes: the first calls of a process."""

from __future__ import annotations

import process_modes
import pytest
from pypto_process import in_its_own_process

QUICK = {"fp64 by default", "meta by default", "inference"}
"""The modes that every change waits for: each starts a process of its own, with PyPTO."""


@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=() if m in QUICK else pytest.mark.slow) for m in process_modes.MODES]
)
@in_its_own_process
def test_calls_work_under_it_and_after_it(mode: str) -> None:
    process_modes.check(mode, "pypto")
