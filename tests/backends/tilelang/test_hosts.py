"""The TileLang backend behind the front end, on the CPU: what it refuses, and the gates that KDA_EMULATE=1 can run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fake_backends import FakeBackend
from recorder import Recorder

import kda
from kda import backends
from kda.backends import tilelang as tilelang_backend
from kda.checks import checked
from kda.gates.case import run_case
from kda.gates.command import CASES
from kda.golden import inputs, recurrent_kda_golden, rel_rmse

pytest.importorskip("tilelang")


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_EMULATE", "1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_device_it_says_so(monkeypatch):
    monkeypatch.delenv("KDA_EMULATE", raising=False)
    assert any("there is no CUDA device" in reason for reason in backends.status()["tilelang"])
    with pytest.raises(NotImplementedError, match="there is no CUDA device"):
        kda.chunk_kda(**inputs.stable(1, 10, 1), backend="tilelang")


def test_all_reasons_come_at_once(emulate):
    call = inputs.stable(1, 10, 1, 16, 32, dtype=torch.float64)
    with pytest.raises(NotImplementedError) as refusal:
        kda.chunk_kda(**call, backend="tilelang")
    for reason in ("K must be 64 or 128, got 16", "V must be 64 or 128, got 32", "got float64"):
        assert reason in str(refusal.value)


def test_other_gpus_are_refused(monkeypatch):
    call = SimpleNamespace(
        op="chunk_kda", K=128, V=128, B=1, T=8, q=SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda", 0))
    )
    monkeypatch.setattr(tilelang_backend, "missing_compilers", lambda nvcc: None)
    monkeypatch.setattr(tilelang_backend, "target_for", lambda device: "sm_80")
    assert tilelang_backend.refuses(call) == ["its kernels are for Hopper GPUs (sm_90a), got sm_80"]
    monkeypatch.setattr(tilelang_backend, "target_for", lambda device: "sm_90a")
    assert tilelang_backend.refuses(call) == []


@pytest.mark.parametrize(
    "id",
    [
        "V0",
        "LAYOUT",
        "GVA",
        "EMPTY",
        "PADDING",
        "POISON",
        "STRIDES",
        "ALIAS",
        "GMIX",
        "SOFTPLUS",
        "DECODE",
        pytest.param("SPLIT", marks=pytest.mark.slow),
    ],
)
def test_gates(emulate, id):
    result = run_case(CASES[id], "tilelang", torch.device("cpu"), torch.bfloat16)
    assert result.outcome == "passed", (result.reason, [f.text for f in result.findings if not f.ok])


def test_stages_are_named(emulate, register):
    """A fault in what prepare computes is traced to the first tensor that it spoils."""

    class WrongScale(FakeBackend):
        differentiable = False

        def run(self, call):
            return tilelang_backend.chunk_kda(replace(call, scale=1.5 * call.scale))

        def stages(self, call):
            return tilelang_backend.stages(replace(call, scale=1.5 * call.scale))

    register("wrong scale", WrongScale())
    result = run_case(CASES["L0"], "wrong scale", torch.device("cpu"), torch.bfloat16)
    assert any("first stage that departs: M2 (Aqk" in finding.text for finding in result.findings)


@pytest.mark.parametrize("lengths", [None, [0, 0]])
def test_a_call_without_tokens_keeps_its_states(emulate, lengths):
    call = inputs.stable(1, 0, 1, 64, lengths=lengths, initial_state=True)
    o, state = kda.chunk_kda(**call, backend="tilelang")
    assert o.shape == call["v"].shape and torch.equal(state, call["initial_state"])
    state.zero_()
    assert call["initial_state"].any(), "the caller's state is not handed back as the result"
    _, state = kda.chunk_kda(**call | {"initial_state": None}, backend="tilelang")
    assert not state.any()


def test_one_build_serves_every_length(emulate):
    from kda.backends.tilelang.build import kernel

    def built() -> int:
        return kernel.cache_info().misses

    def call(T: int, H: int, HV: int) -> None:
        kda.chunk_kda(**inputs.stable(1, T, H, 64, HV=HV), backend="tilelang")

    call(5, 1, 1)
    before = built()
    for T in range(1, 20):
        call(T, 1, 1)
    assert built() == before
    call(5, 1, 5)  # a number of heads that no other test has
    assert built() == before + 2  # prepare and carry


def test_tiles_narrow_until_the_processors_are_busy(emulate, monkeypatch):
    from kda.backends.tilelang import chunk, tables

    widths = {}

    def build(target, builder, **parameters):
        widths[builder] = parameters.get("block_V")
        return lambda *arguments: None

    def width(states: int, V: int) -> int:
        call = checked("chunk_kda", **inputs.stable(states, 1, 1, 64, V))
        chunk.chunk_kda(replace(call, memo={}))  # what is decided here must not stay
        return widths["kda.backends.tilelang.kernels.carry.carry"]

    monkeypatch.setattr(tables, "build", build)
    monkeypatch.setattr(tables, "processors", lambda device: 132)
    assert [width(states, 128) for states in (1, 64, 92, 93, 1000)] == [64, 64, 64, 128, 128]
    assert width(1, 64) == width(1000, 64) == 64


@pytest.mark.parametrize("packed", [False, True])
def test_views_of_one_projection_are_read_as_they_lie(emulate, packed: bool) -> None:
    """The launch of a decoding step copies nothing, whatever lies between the tokens."""
    call = inputs.raw(1, 5, 2, 64, dtype=torch.float32, initial_state=True, lengths=[2, 3] if packed else None)
    names = ("q", "k", "v", "g", "beta")
    rows = F.pad(torch.cat([call[name].flatten(2) for name in names], -1), (0, 6))  # tokens 520 elements apart
    views = dict(zip(names, rows[..., :514].split([128, 128, 128, 128, 2], -1), strict=True))
    strided = call | {name: x if name == "beta" else x.unflatten(-1, (2, 64)) for name, x in views.items()}
    assert not any(strided[name].is_contiguous() for name in names)
    with Recorder() as recorder:
        o, state = kda.fused_recurrent_kda(**strided, backend="tilelang")
    assert recorder.names <= {"empty_like", "new_empty"}
    expected_o, expected = recurrent_kda_golden(**call)
    assert rel_rmse(o, expected_o) < 2e-6 and rel_rmse(state, expected) < 2e-6
    apart = strided | {"q": call["q"].mT.contiguous().mT}  # channels apart: a copy
    assert torch.equal(kda.fused_recurrent_kda(**apart, backend="tilelang")[0], o)
