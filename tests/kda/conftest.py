"""What the front end's tests share."""

from __future__ import annotations

import pytest

from kda import backends


@pytest.fixture
def no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that gets past the front end fails the test."""

    def select(call: object, backend: str | None = None) -> str:
        pytest.fail("the call reached a backend")

    monkeypatch.setattr(backends, "select", select)
