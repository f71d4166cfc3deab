"""What the PyPTO backend's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kda.backends.pypto import detect


@pytest.fixture
def undetected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that was found out about this machine is remembered."""
    monkeypatch.delenv("KDA_EMULATE", raising=False)
    monkeypatch.setattr(detect, "_failed_import", None)
    found = (detect._missing_distribution, detect.missing_npu, detect.missing_interpreter)
    for look_up in found:
        look_up.cache_clear()
    yield
    for look_up in found:
        look_up.cache_clear()
