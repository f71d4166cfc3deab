"""fused_recurrent_kda on one table of calls: torch, and the kernels of TileLang and PyPTO executed on the CPU."""

from __future__ import annotations

import importlib.util

import pytest
from decode_calls import CALLS, DRAFTS, check, check_drafts
from pypto_process import in_its_own_process

LIMIT = 2e-6  # a few roundings in fp32


@pytest.mark.parametrize("name", CALLS)
def test_torch(name: str) -> None:
    check(name, "torch", LIMIT)


@pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="needs tilelang")
@pytest.mark.parametrize("name", CALLS)
def test_tilelang(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_EMULATE", "1")
    check(name, "tilelang", LIMIT)


@pytest.mark.parametrize("name", DRAFTS)
def test_torch_keeps_drafts(name: str) -> None:
    check_drafts(name, "torch", LIMIT)


@pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="needs tilelang")
@pytest.mark.parametrize("name", DRAFTS)
def test_tilelang_keeps_drafts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_EMULATE", "1")
    check_drafts(name, "tilelang", LIMIT)


@in_its_own_process
def test_pypto() -> None:
    for name in CALLS:
        check(name, "pypto", LIMIT)
