"""The registry: who takes a call, what a refusal says, and when torch steps in."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from calls import dense
from fake_backends import FakeBackend

import kda
from kda import backends

pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.fixture
def fake(register: Callable[..., FakeBackend]) -> FakeBackend:
    """A backend `fake`, which `auto` takes for CPU tensors."""
    return register("fake", FakeBackend(), device_type="cpu")


@pytest.mark.parametrize(
    "device, name", [("cuda", "tilelang"), ("npu", "pypto"), ("cpu", "torch"), ("mps", "torch"), ("meta", "torch")]
)
def test_for_device(device: str, name: str) -> None:
    assert backends.for_device(device) == name


@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_auto_goes_by_device(operator, register) -> None:
    fake = register("fake", FakeBackend(), device_type="meta")
    assert backends.for_device("meta") == "fake" and backends.for_device("cpu") == "torch"
    operator(**dense())
    assert not fake.calls, "CPU tensors go to torch"
    o, _ = operator(**{name: x.to("meta") for name, x in dense().items()})
    assert o.is_meta and len(fake.calls) == 1 and fake.calls[0].op == operator.__name__


def test_the_argument_wins_over_the_environment(register, monkeypatch) -> None:
    fake = register("fake", FakeBackend())
    kda.chunk_kda(**dense())
    assert len(fake.calls) == 0
    monkeypatch.setenv("KDA_BACKEND", "fake")
    kda.chunk_kda(**dense())
    assert len(fake.calls) == 1
    kda.chunk_kda(**dense(), backend="torch")
    kda.chunk_kda(**dense(), backend="auto")
    assert len(fake.calls) == 1
    monkeypatch.setenv("KDA_BACKEND", "torch")
    kda.chunk_kda(**dense(), backend="fake")
    assert len(fake.calls) == 2
    monkeypatch.setenv("KDA_BACKEND", "")
    kda.chunk_kda(**dense())
    assert len(fake.calls) == 2


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


def test_status(fake: FakeBackend) -> None:
    fake.missing += ["no card", "no driver"]
    status = backends.status()
    assert tuple(status) == backends.names() == ("tilelang", "pypto", "torch", "fake")
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
@pytest.mark.parametrize("what", ["missing", "refusals"])
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
    assert not fake.calls


@pytest.mark.parametrize("what", ["missing", "refusals"])
def test_auto_falls_back_with_one_warning_per_reason(what, fake) -> None:
    reasons = getattr(fake, what)
    reasons += [f"K must be 128, got 8 ({what})", f"V must be 128, got 4 ({what})"]  # a process hears each but once
    with pytest.warns(RuntimeWarning) as caught:
        o, _ = kda.chunk_kda(**dense())
        kda.chunk_kda(**dense())
    assert [str(w.message) for w in caught] == [
        f"kda: fake cannot take this chunk_kda call ({reason}); using torch instead" for reason in reasons
    ]
    assert {w.filename for w in caught} == {__file__}, "the warning points at the caller"
    assert torch.equal(o, kda.chunk_kda(**dense(), backend="torch")[0]) and not fake.calls
    reasons += [f"no driver ({what})"]
    with pytest.warns(RuntimeWarning, match=rf"\(no driver \({what}\)\)") as caught:
        kda.chunk_kda(**dense())
    assert len(caught) == 1
    reasons.clear()
    kda.chunk_kda(**dense())
    assert len(fake.calls) == 1


def test_a_registered_backend_may_stand_in_for_one_of_the_package(register) -> None:
    package, fake = backends.load("torch"), register("torch", FakeBackend())
    assert backends.load("torch") is fake
    kda.chunk_kda(**dense())
    assert len(fake.calls) == 1 and backends.names() == ("tilelang", "pypto", "torch")
    backends.unregister("torch")
    assert backends.load("torch") is package


def test_what_was_never_registered_cannot_be_taken_away() -> None:
    for name in ("torch", "nosuch"):
        with pytest.raises(KeyError, match=name):
            backends.unregister(name)
    assert backends.load("torch").about


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_choice_does_not_outlive_a_change_of_the_registry(device, register) -> None:
    """Calls alike share what was decided for them once; not who takes them, once somebody else does."""
    call = {name: x.to(device) for name, x in dense().items()}
    first, second = FakeBackend(), FakeBackend()
    register("first", first, device_type=device)
    kda.chunk_kda(**call)
    register("second", second, device_type=device)
    kda.chunk_kda(**call)
    assert (len(first.calls), len(second.calls)) == (1, 1)


@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_an_argument_that_a_backend_does_not_take_is_refused_by_name(operator, fake) -> None:
    fake.takes = {"scale", "output_final_state"}  # every checked call has a scale
    operator(**dense(output_final_state=True, state_v_first=True), backend="fake")  # a default is no demand
    asked = dense(use_qk_l2norm_in_kernel=True, state_v_first=False)
    with pytest.raises(NotImplementedError) as error:
        operator(**asked, backend="fake")
    assert str(error.value) == (
        f"backend 'fake' cannot take this {operator.__name__} call: "
        "it does not take use_qk_l2norm_in_kernel, state_v_first"
    )
    fake.refusals = ["T must be even, got 3"]
    with pytest.raises(NotImplementedError, match=r"it does not take .*, state_v_first; T must be even, got 3"):
        operator(**asked, backend="fake")
