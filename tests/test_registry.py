"""The registry: who takes a call, what a refusal says, and when torch steps in."""

from __future__ import annotations

import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from calls import dense

import kda
from kda import backends

FAKE = """
from __future__ import annotations
CALLS, UNUSABLE, REFUSALS, differentiable = [], [], [], True
def unusable(): return list(UNUSABLE)
def refuses(call): return list(REFUSALS)
def run(call):
    CALLS.append(call)
    return call.v.clone(), None
chunk_kda = fused_recurrent_kda = run
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.ModuleType:
    """A backend `fake`, imported from a folder like any other, which `auto` takes for CPU tensors."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "__init__.py").write_text(FAKE)
    monkeypatch.delenv("KDA_BACKEND", raising=False)
    monkeypatch.setattr(backends, "NAMES", (*backends.NAMES, "fake"))
    monkeypatch.setattr(backends, "_FOR_DEVICE", {"cpu": "fake"})
    monkeypatch.setattr(backends, "_warned", set())
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    backends.load.cache_clear()
    yield backends.load("fake")
    backends.load.cache_clear()
    del sys.modules["kda.backends.fake"], backends.fake


@pytest.mark.parametrize(
    "device, name", [("cuda", "tilelang"), ("npu", "pypto"), ("cpu", "torch"), ("mps", "torch"), ("meta", "torch")]
)
def test_for_device(device: str, name: str) -> None:
    assert backends.for_device(device) == name


@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_auto_goes_by_device(operator, fake, monkeypatch) -> None:
    monkeypatch.setattr(backends, "_FOR_DEVICE", {"meta": "fake"})
    operator(**dense())
    assert not fake.CALLS, "CPU tensors go to torch"
    o, _ = operator(**{name: x.to("meta") for name, x in dense().items()})
    assert o.is_meta and len(fake.CALLS) == 1 and fake.CALLS[0].op == operator.__name__


def test_the_argument_wins_over_the_environment(fake, monkeypatch) -> None:
    monkeypatch.setattr(backends, "_FOR_DEVICE", {})
    kda.chunk_kda(**dense())
    assert len(fake.CALLS) == 0
    monkeypatch.setenv("KDA_BACKEND", "fake")
    kda.chunk_kda(**dense())
    assert len(fake.CALLS) == 1
    kda.chunk_kda(**dense(), backend="torch")
    kda.chunk_kda(**dense(), backend="auto")
    assert len(fake.CALLS) == 1
    monkeypatch.setenv("KDA_BACKEND", "torch")
    kda.chunk_kda(**dense(), backend="fake")
    assert len(fake.CALLS) == 2
    monkeypatch.setenv("KDA_BACKEND", "")
    kda.chunk_kda(**dense())
    assert len(fake.CALLS) == 2


@pytest.mark.parametrize("name", ["cuda", "Torch", ""])
def test_unknown_name(name: str, monkeypatch) -> None:
    known = "expected one of auto, tilelang, pypto, torch, got "
    with pytest.raises(ValueError) as error:
        kda.chunk_kda(**dense(), backend=name)
    assert str(error.value) == f"backend: {known}{name!r}"
    with pytest.raises(ValueError, match="expected one of tilelang, pypto, torch, got"):
        backends.load(name)
    if name:
        monkeypatch.setenv("KDA_BACKEND", name)
        with pytest.raises(ValueError) as error:
            kda.chunk_kda(**dense())
        assert str(error.value) == f"KDA_BACKEND: {known}{name!r}"


@pytest.mark.parametrize("backend", [["torch"], 3, torch.zeros(2)])
def test_no_name_at_all(backend: object) -> None:
    with pytest.raises(TypeError, match=f"^backend: expected a str or None, got {type(backend).__name__}$"):
        kda.chunk_kda(**dense(), backend=backend)


def test_status(fake) -> None:
    fake.UNUSABLE += ["no card", "no driver"]
    status = backends.status()
    assert list(status) == ["tilelang", "pypto", "torch", "fake"]
    assert status["torch"] == []
    assert status["fake"] == ["no card", "no driver"]
    assert all(isinstance(reason, str) for reasons in status.values() for reason in reasons)


def test_every_named_backend_that_is_not_usable_says_why() -> None:
    for name, reasons in backends.status().items():
        if reasons:
            with pytest.raises(NotImplementedError) as error:
                kda.chunk_kda(**dense(), backend=name)
            message = f"backend '{name}' cannot take this chunk_kda call: {'; '.join(reasons)}"
            assert str(error.value) == message


@pytest.mark.parametrize("how", ["argument", "environment"])
@pytest.mark.parametrize("what", ["UNUSABLE", "REFUSALS"])
def test_a_named_backend_never_falls_back(how, what, fake, monkeypatch) -> None:
    getattr(fake, what)[:] = ["K must be 128, got 8", "V must be 128, got 4"]
    if how == "environment":
        monkeypatch.setenv("KDA_BACKEND", "fake")
    with warnings.catch_warnings(), pytest.raises(NotImplementedError) as error:
        warnings.simplefilter("error")
        kda.fused_recurrent_kda(**dense(), backend="fake" if how == "argument" else None)
    assert str(error.value) == (
        "backend 'fake' cannot take this fused_recurrent_kda call: K must be 128, got 8; V must be 128, got 4"
    )
    assert not fake.CALLS


@pytest.mark.parametrize("what", ["UNUSABLE", "REFUSALS"])
def test_auto_falls_back_with_one_warning_per_reason(what, fake) -> None:
    reasons = getattr(fake, what)
    reasons += ["K must be 128, got 8", "V must be 128, got 4"]
    with pytest.warns(RuntimeWarning) as caught:
        o, _ = kda.chunk_kda(**dense())
        kda.chunk_kda(**dense())
    assert [str(w.message) for w in caught] == [
        f"kda: fake cannot take this chunk_kda call ({reason}); using torch instead" for reason in reasons
    ]
    assert {w.filename for w in caught} == {__file__}, "the warning points at the caller"
    assert torch.equal(o, kda.chunk_kda(**dense(), backend="torch")[0]) and not fake.CALLS
    reasons += ["no driver"]
    with pytest.warns(RuntimeWarning, match=r"\(no driver\)") as caught:
        kda.chunk_kda(**dense())
    assert len(caught) == 1
    reasons.clear()
    kda.chunk_kda(**dense())
    assert len(fake.CALLS) == 1
