"""fused_recurrent_kda on the shared table of calls: the torch backend, and the TileLang kernel executed on the CPU."""

from __future__ import annotations

import importlib.util

import pytest
from decode_calls import CALLS, check

LIMIT = 2e-6  # a few roundings in fp32


@pytest.mark.parametrize("name", CALLS)
def test_torch(name: str) -> None:
    check(name, "torch", LIMIT)


@pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="needs tilelang")
@pytest.mark.parametrize("name", CALLS)
def test_tilelang(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_EMULATE", "1")
    check(name, "tilelang", LIMIT)
