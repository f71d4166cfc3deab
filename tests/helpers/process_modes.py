"""What a process may have set around a call, and must not change its result: default dtype and device, and modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

import kda
from kda.golden import inputs


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bf16 by default": lambda: default_dtype(torch.bfloat16),
    "fp64 by default": lambda: default_dtype(torch.float64),
    "meta by default": lambda: torch.device("meta"),
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def calls() -> list[tuple[Callable[..., Any], dict[str, Any]]]:
    """Both operators, fixed length and packed, with and without what a backend makes constants for."""
    sizes = {"dtype": torch.float32}
    return [
        (kda.chunk_kda, inputs.raw(1, 20, 1, 64, **sizes) | {"dt_bias": None}),
        (kda.chunk_kda, inputs.stable(1, 20, 1, 64, lengths=[3, 0, 15], initial_state=True, **sizes)),
        (kda.fused_recurrent_kda, inputs.raw(2, 2, 1, 64, lower_bound=-5.0, **sizes) | {"A_log": None}),
        (kda.fused_recurrent_kda, inputs.stable(1, 4, 1, 64, lengths=[3, 1], initial_state=True, **sizes)),
    ]


def results(backend: str) -> list[Tensor]:
    """o and states of all of them."""
    found = []
    for operator, call in calls():
        found += operator(**call, backend=backend)
    return found


def check(mode: str, backend: str) -> None:
    """The mode changes no bit, dtype or device, and leaves nothing behind that would: before it, in it and after it."""
    with MODES[mode]():
        during = results(backend)  # the first ones: what a backend keeps of them was made in the mode
    for context in (nullcontext(), MODES[mode]()):
        with context:
            for actual, expected in zip(results(backend), during, strict=True):
                assert actual.device.type == "cpu" and actual.dtype == expected.dtype == torch.float32
                assert torch.equal(actual, expected)
