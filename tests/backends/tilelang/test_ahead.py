"""Building ahead: which kernels a call needs, and processes that build them side by side."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("tilelang")

from kda import backends
from kda.backends.call import DIFFERENTIABLE, KdaCall
from kda.backends.tilelang import (
    ahead,
    backward,
    build,
    build_ahead,
    build_all,
    host,
    recurrent,
    tables,
    wanted,
)  # fmt: skip
from kda.backends.tilelang.build import CPU, HOPPER, Spec
from kda.checks import checked
from kda.golden import inputs
from kda.library import Recorded

KERNELS = "kda.backends.tilelang.kernels"


@pytest.fixture(autouse=True)
def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_EMULATE", "1")


@pytest.fixture
def nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "kernel", lambda spec: pytest.fail(f"{spec} is built"))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hosts take CPU tensors for those of an H200."""
    for module in (backward, host, recurrent, tables):
        monkeypatch.setattr(module, "target_for", lambda device: HOPPER)
    for module in (backward, recurrent, tables):
        monkeypatch.setattr(module, "processors", lambda device: 132)


def names(call: KdaCall) -> list[str]:
    return [spec.builder.removeprefix(f"{KERNELS}.") for spec in wanted(call)]


def chunk_call(**options: Any) -> KdaCall:
    return checked("chunk_kda", **inputs.raw(1, 20, 1, 64, **options))


def decoding_call(**options: Any) -> KdaCall:
    states = {"initial_state": torch.zeros(3, 1, 64, 64), "ssm_state_indices": torch.tensor([1, 2])}
    return checked("fused_recurrent_kda", **inputs.raw(2, 1, 1, 64) | states, inplace_final_state=True, **options)


@pytest.mark.usefixtures("nothing_is_built")
def test_the_kernels_of_a_call() -> None:
    packed, decoding = chunk_call(lengths=[5, 15]), decoding_call()
    pool = decoding.initial_state.clone()
    assert names(packed) == ["plan.plan", "prepare.prepare", "carry.carry"]
    assert names(chunk_call()) == ["prepare.prepare", "carry.carry"]
    assert names(decoding) == ["recurrent.fused_recurrent"]
    assert names(replace(decoding, initial_state=torch.zeros(3, 1, 64, 65)[..., :64])) == names(decoding)
    assert names(checked("chunk_kda", **inputs.stable(1, 0, 1, 64))) == []
    assert not packed.memo and not decoding.memo, "nothing of it stays"
    assert torch.equal(decoding.initial_state, pool)
    assert {spec.target for spec in wanted(packed)} == {CPU}


def pool(offset: int, distance: int) -> Tensor:
    """Three states so many elements apart, so many from the start of their memory."""
    memory = torch.zeros(3 * distance + offset)
    return memory.as_strided((3, 1, 64, 64), (distance, 64 * 64, 64, 1), offset)


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize(("offset", "distance"), [(0, 4096), (4, 4096), (0, 4100), (1, 4096), (0, 4099)])
def test_a_call_of_fake_tensors_needs_what_a_real_one_does(offset: int, distance: int) -> None:
    with FakeTensorMode() as mode:
        pass
    real = replace(decoding_call(), initial_state=pool(offset, distance))
    tensors = {field.name: getattr(real, field.name) for field in fields(real) if field.init}
    fake = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in tensors.items()}
    assert wanted(KdaCall(**fake)) == wanted(real)
    (spec,) = wanted(real)
    assert dict(spec.parameters)["gaps"] == bool(offset % 4 or distance % 4)


@pytest.mark.usefixtures("nothing_is_built", "hopper")
def test_the_kernels_of_a_call_on_a_gpu() -> None:
    call = chunk_call(lengths=[5, 15], dtype=torch.bfloat16)
    assert names(call) == ["plan.plan", "sm90.prepare.prepare", "carry.carry"]
    _, prepare, carry = wanted(call)
    assert prepare.target == HOPPER and dict(prepare.parameters)["dtype"] == "bfloat16"
    assert dict(carry.parameters)["block_V"] == 64


def test_they_are_the_ones_that_the_call_then_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (chunk_call(lengths=[5, 15]), decoding_call()):
        taken: list[Spec] = []
        with monkeypatch.context() as patch:
            patch.setattr(build, "kernel", lambda spec, taken=taken: taken.append(spec) or (lambda *_: None))
            getattr(backends.load("tilelang"), call.op)(replace(call, memo={}))
        assert taken == wanted(call)


def recorded(call: KdaCall) -> KdaCall:
    """The call with leaves that require a gradient, and with nothing that is remembered of others like it."""
    return replace(call, memo={}, **{name: getattr(call, name).detach().requires_grad_() for name in DIFFERENTIABLE})


@pytest.mark.usefixtures("nothing_is_built")
def test_the_kernels_of_a_call_and_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    call = recorded(chunk_call(lengths=[5, 15], initial_state=True))
    forward = ["plan.plan", "prepare.prepare", "carry.carry"]
    kernels = ["chunk_delta_h.chunk_delta_h", "backward.carry.carry", "backward.prepare.prepare"]
    assert names(call) == [*forward, "plan.plan", "prepare.prepare", *kernels]
    with torch.no_grad():
        assert names(call) == forward
    monkeypatch.setenv("KDA_KEEP_TABLE", "1")
    assert names(call) == [*forward, "plan.plan", *kernels], "prepare is the same for both"
    assert names(replace(call, **{name: getattr(call, name).detach() for name in DIFFERENTIABLE})) == forward


@pytest.mark.parametrize("keep", ["0", "1"])
@pytest.mark.parametrize("only_q", [False, True])
@pytest.mark.parametrize("output_final_state", [False, True])
def test_they_are_the_ones_that_a_training_step_takes(
    monkeypatch: pytest.MonkeyPatch, output_final_state: bool, only_q: bool, keep: str
) -> None:
    monkeypatch.setenv("KDA_KEEP_TABLE", keep)
    call = recorded(chunk_call(lengths=[5, 15], initial_state=True))
    call.output_final_state = output_final_state
    if only_q:
        call = replace(call, **{name: getattr(call, name).detach() for name in DIFFERENTIABLE if name != "q"})
    taken: list[Spec] = []
    with monkeypatch.context() as patch:
        patch.setattr(build, "kernel", lambda spec: taken.append(spec) or (lambda *_: None))
        o, _ = Recorded.apply(replace(call, memo={}), "tilelang", *(getattr(call, name) for name in DIFFERENTIABLE))
        o.sum().backward()
    assert list(dict.fromkeys(taken)) == wanted(call)


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize(("lengths", "columns"), [(None, 128), ([5, 15], 64)])
def test_gradients_of_packed_calls_are_walked_by_narrow_tiles(lengths: list[int] | None, columns: int) -> None:
    call = recorded(checked("chunk_kda", **inputs.raw(1, 20, 1, 64, V=128, lengths=lengths, initial_state=True)))
    found = {spec.builder.removeprefix(f"{KERNELS}."): dict(spec.parameters).get("block_V") for spec in wanted(call)}
    assert found["carry.carry"] == 128
    assert found["chunk_delta_h.chunk_delta_h"] == found["backward.carry.carry"] == columns


@pytest.mark.usefixtures("nothing_is_built", "hopper")
@pytest.mark.parametrize("keep", ["0", "1"])
def test_gradients_of_fp16_are_computed_in_bf16(monkeypatch: pytest.MonkeyPatch, keep: str) -> None:
    monkeypatch.setenv("KDA_KEEP_TABLE", keep)
    specs = wanted(recorded(chunk_call(initial_state=True, dtype=torch.float16)))
    dtypes = [(spec.builder.removeprefix(f"{KERNELS}."), dict(spec.parameters)["dtype"]) for spec in specs]
    assert dtypes == [
        ("sm90.prepare.prepare", "float16"), ("carry.carry", "float16"), ("sm90.prepare.prepare", "bfloat16"),
        ("chunk_delta_h.chunk_delta_h", "bfloat16"), ("backward.carry.carry", "bfloat16"),
        ("backward.prepare.prepare", "bfloat16"),
    ]  # fmt: skip


def spec(name: str, **parameters: Any) -> Spec:
    return Spec(HOPPER, f"{KERNELS}.{name}", tuple(sorted(parameters.items())))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_processes_build_them_and_later_calls_load_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    plan, other = (spec("plan.plan", HV=HV, V=64, dtype="bfloat16", cu_dtype="int32") for HV in (2, 4))
    wrong = spec("plan.plan", HV=2, V=64, dtype="no dtype", cu_dtype="int32")
    dies = Spec(HOPPER, "os._exit", (("status", 3),))
    failures = build_all([wrong, plan, dies, other, plan], workers=2)
    reasons = {failure.spec: failure.reason for failure in failures}
    assert set(reasons) == {wrong, dies} and len(failures) == 2
    assert "RuntimeError: kda.backends.tilelang.kernels.plan.plan cannot be compiled for sm_90a" in reasons[wrong]
    assert "ended with exit code 3" in reasons[dies]
    assert plan.kept().exists() and other.kept().exists()

    monkeypatch.setattr(build, "compile_kernel", lambda *_: pytest.fail("it is compiled again"))
    monkeypatch.setattr(ahead, "_start", lambda log: pytest.fail("a process for nothing"))
    assert build_all([plan, other]) == []
    for each in (plan, other):
        assert build.build(each.target, each.builder, **dict(each.parameters)) is not None


def test_no_process_can_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What keeps every worker from starting is told of every kernel."""
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ahead, "_SERVE", "raise SystemExit('out of luck')")
    specs = [spec("plan.plan", HV=HV, V=64, dtype="bfloat16", cu_dtype="int32") for HV in (2, 4)]
    failures = build_all(specs, workers=1)
    assert [failure.spec for failure in failures] == specs
    assert all("out of luck" in failure.reason for failure in failures)
    assert build_all([]) == []


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_a_call_waits_for_what_is_being_built_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    calls = [checked("chunk_kda", **inputs.stable(1, T, 1, 64)) for T in (5, 6)]
    assert build_ahead(calls, workers=1)() == []
    assert len(list(tmp_path.rglob("kernel_lib.so"))) == 2, "prepare and carry, once for both calls"


def test_it_ends_with_its_process(tmp_path: Path) -> None:
    code = """
import time
from kda.backends.tilelang import ahead
from kda.backends.tilelang.build import Spec
started = []
def start(log):
    started.append(begin(log))
    return started[-1]
begin, ahead._start, ahead._SERVE = ahead._start, start, "import time; time.sleep(100)"
specs = [Spec("sm_90a", "kda.backends.tilelang.kernels.plan.plan", (("HV", HV),)) for HV in range(9)]
ahead._begin(specs, 2)
while len(started) < 2:
    time.sleep(0.01)
print(*(process.pid for process in started))
"""
    environment = os.environ | {"TILELANG_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=50)
    assert done.returncode == 0, done.stderr[-2000:]
    for worker in map(int, done.stdout.split()):
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)
