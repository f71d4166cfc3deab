"""A sequence's bits don't depend on its neighbours, on how many there are, on padding, or on being packed at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pypto_process import in_its_own_process
from torch import Tensor

import kda
from kda.backends.call import PER_TOKEN
from kda.golden import inputs

LENGTHS = {"torch": (1, 2, 3, 4, 5, 31, 64, 65, 100), "tilelang": (1, 3, 65), "pypto": (1, 130)}
NEIGHBOURS = ([], [7], [1, 0, 90], [200])


def same_bits(backend: str, operator: Callable[..., Any], length: int) -> None:
    alone = inputs.raw(1, length, 1, 64, dtype=torch.float32, initial_state=True)
    o, state = operator(**alone, backend=backend)
    for before in NEIGHBOURS:
        for after in NEIGHBOURS[1:] if backend == "torch" else NEIGHBOURS[1:2]:
            packed_o, packed_state = operator(**packed(alone, before, after), backend=backend)
            start, n = 2 + sum(before), len(before)
            assert torch.equal(packed_o[:, start : start + length], o), (before, after)
            assert torch.equal(packed_state[n : n + 1], state), (before, after)


def packed(alone: dict[str, Any], before: list[int], after: list[int]) -> dict[str, Any]:
    """The sequence between others, with padding of NaN at both ends."""
    length = alone["q"].shape[1]
    lengths = [*before, length, *after]
    call = inputs.raw(1, sum(lengths) + 5, 1, 64, dtype=torch.float32, initial_state=True, lengths=lengths, seed=1)
    start, end = 2 + sum(before), 2 + sum(lengths)
    call["cu_seqlens"] = call["cu_seqlens"] + 2
    for name in PER_TOKEN:
        x: Tensor = call[name]
        x[:, :2] = x[:, end:] = torch.nan
        x[:, start : start + length] = alone[name]
    call["initial_state"][len(before)] = alone["initial_state"][0]
    return call | {name: alone[name] for name in ("A_log", "dt_bias")}


OPERATORS = {"chunk_kda": kda.chunk_kda, "fused_recurrent_kda": kda.fused_recurrent_kda}


@pytest.mark.parametrize("length", LENGTHS["torch"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_torch(operator: str, length: int) -> None:
    same_bits("torch", OPERATORS[operator], length)


@pytest.mark.parametrize("length", LENGTHS["tilelang"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_tilelang(operator: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tilelang")
    monkeypatch.setenv("KDA_EMULATE", "1")
    same_bits("tilelang", OPERATORS[operator], length)


@pytest.mark.parametrize(
    "length", [pytest.param(n, marks=pytest.mark.slow if n == 1 else ()) for n in LENGTHS["pypto"]]
)
@pytest.mark.parametrize("operator", OPERATORS)
@in_its_own_process
def test_pypto(operator: str, length: int) -> None:
    if operator == "fused_recurrent_kda":
        length = min(length, 3)
    same_bits("pypto", OPERATORS[operator], length)
