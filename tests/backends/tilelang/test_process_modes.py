"""The TileLang backend, executed on the CPU, under torch's defaults and modes."""

from __future__ import annotations

import process_modes
import pytest

pytest.importorskip("tilelang")


@pytest.mark.parametrize("mode", process_modes.MODES)
def test_calls_work_under_it_and_after_it(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("KDA_EMULATE", "1")
    process_modes.check(mode, "tilelang")
