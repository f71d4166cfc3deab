"""The variables' spellings: on, off, and what is neither."""

from __future__ import annotations

import pytest

from kda import backends
from kda.backends import environment


@pytest.mark.parametrize("name", ["KDA_EMULATE", "KDA_CHECK"])
def test_switches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = environment.emulating if name == "KDA_EMULATE" else environment.checking
    for text, on in {"1": True, "true": True, "YES": True, "on": True, "0": False, "False": False, "no": False,
                     "off": False, "": False}.items():  # fmt: skip
        monkeypatch.setenv(name, text)
        assert read() is on, text
    monkeypatch.delenv(name)
    assert read() is False
    monkeypatch.setenv(name, "maybe")
    with pytest.raises(ValueError, match=f"^{name}: expected one of 1, true, yes, on, 0, .* or nothing, got 'maybe'$"):
        read()


def test_how_long_segments_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KDA_SPLIT", raising=False)
    assert environment.chunks_of_a_segment() is None
    for text, chunks in {"auto": None, "": None, "OFF": 0, "1": 1, "64": 64}.items():
        monkeypatch.setenv("KDA_SPLIT", text)
        assert environment.chunks_of_a_segment() == chunks, text
    for text in ("0", "-1", "on", "1.5", "99999999999", "²"):
        monkeypatch.setenv("KDA_SPLIT", text)
        with pytest.raises(ValueError, match=f"^KDA_SPLIT: expected auto, off or a number of chunks .* got '{text}'$"):
            environment.chunks_of_a_segment()


def test_emulation_by_another_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_EMULATE", "yes")
    assert not any("KDA_EMULATE" in reason for reason in backends.unusable("tilelang"))
