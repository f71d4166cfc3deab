"""These tests need a CUDA device; elsewhere each is skipped with that reason."""

from __future__ import annotations

import itertools
from pathlib import Path

import decode_calls
import pytest
import torch

from kda.backends import tilelang
from kda.checks import checked
from kda.gates.command import CASES
from kda.gates.dry import calls_of

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def kernels_ahead() -> None:
    """Begin to build the kernels of the gates and the decoding calls side by side; nobody waits for the end.

    A test whose kernel is not there yet builds it, or waits for the process that does.
    """
    fast, device = [case for case in CASES.values() if not case.slow], torch.device("cuda", 0)
    dtypes = (torch.bfloat16, torch.float16)
    calls = [call for dtype in dtypes for call in calls_of(fast, "tilelang", device, dtype)]
    for dtype, call in itertools.product(dtypes, decode_calls.CALLS.values()):
        low = dict.fromkeys(("q", "k", "v"), dtype)
        placed = {name: decode_calls.placed(x, "cuda", low.get(name)) for name, x in call().items()}
        calls.append(checked("fused_recurrent_kda", **placed))
    tilelang.build_ahead(calls)
