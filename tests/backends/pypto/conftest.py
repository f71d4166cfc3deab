"""What the PyPTO backend's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kda.backends.pypto import detect


@pytest.fixture
def undetected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that was found out about this machine is remembered."""
    monkeypatch.delenv("KDA_EMULATE", raising=False)
    found = (detect.missing_pypto, detect.missing_npu, detect.missing_interpreter)
    for look_up in found:
        look_up.cache_clear()
    yield
    for look_up in found:
        look_up.cache_clear()
