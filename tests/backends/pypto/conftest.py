"""What the PyPTO backend's tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import fake_npu
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


@pytest.fixture(scope="session")
def fake_npu_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes that are started can call `fake_npu.install`."""
    os.environ[fake_npu.LIBRARY] = str(fake_npu.library(tmp_path_factory.mktemp("fake_npu")))
    yield
    del os.environ[fake_npu.LIBRARY]
