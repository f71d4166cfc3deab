"""The PyPTO backend around its kernels: detection, refusals, what the host does, the way through the front end."""

from __future__ import annotations

import builtins
import logging
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from pypto_process import in_its_own_process
from torch import Tensor

import kda
from kda import backends, golden
from kda.backends import pypto as pypto_backend
from kda.backends.pypto import calculator, constants, detect
from kda.gates import command
from kda.gates.case import CASES, run_case
from kda.golden import inputs
from kda.golden.constants import SUB_BLOCK
from kda.normalise import normalise

NPU = "no /dev/davinci*"


@pytest.fixture
def undetected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was found out about this machine is remembered."""
    monkeypatch.delenv("KDA_EMULATE", raising=False)
    found = (detect.missing_pypto, detect.missing_npu, detect.missing_interpreter)
    for look_up in found:
        look_up.cache_clear()
    yield
    for look_up in found:
        look_up.cache_clear()


# ---- what this machine has


def test_without_a_device_node_torch_npu_is_not_even_looked_for(undetected, monkeypatch):
    monkeypatch.setattr(detect.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(detect.importlib.util, "find_spec", lambda name: pytest.fail(name))
    assert NPU in detect.missing_npu()


def test_a_device_without_torch_npu(undetected, monkeypatch):
    monkeypatch.setattr(detect.glob, "glob", lambda pattern: ["/dev/davinci0"])
    monkeypatch.setattr(detect.importlib.util, "find_spec", lambda name: None)
    assert detect.missing_npu() == "torch_npu is not installed (the extra `npu`)"


@pytest.mark.parametrize("error", [ImportError("libhccl.so"), OSError("libascendcl.so"), SystemExit(1)])
def test_a_broken_torch_npu_is_a_reason_and_no_exception(undetected, monkeypatch, error):
    def failing(name: str, *args: object) -> object:
        if name == "torch_npu":
            raise error
        return real(name, *args)

    real = builtins.__import__
    monkeypatch.setattr(detect.glob, "glob", lambda pattern: ["/dev/davinci0"])
    monkeypatch.setattr(detect.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(builtins, "__import__", failing)
    assert detect.missing_npu() == f"torch_npu does not work: {type(error).__name__}: {error}"


@pytest.mark.parametrize("available", [True, False])
def test_torch_npu_has_the_last_word(undetected, monkeypatch, available):
    monkeypatch.setattr(detect.glob, "glob", lambda pattern: ["/dev/davinci0"])
    monkeypatch.setattr(detect.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace())
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: available), raising=False)
    assert backends.unusable("pypto") == ([] if available else [detect.missing_npu()])
    assert available or "torch.npu.is_available() is False" in detect.missing_npu()


def test_without_pypto_it_says_so(undetected, monkeypatch):
    def absent(name: str) -> str:
        raise detect.PackageNotFoundError(name)

    monkeypatch.setattr(detect, "version", absent)
    for emulate in ("0", "1"):
        monkeypatch.setenv("KDA_EMULATE", emulate)
        assert "pypto is not installed" in backends.unusable("pypto")[0]


@pytest.mark.skipif(bool(detect.glob.glob("/dev/davinci[0-9]*")), reason="needs a machine without an NPU")
def test_without_an_npu_it_says_so_and_how_to_run_it_all_the_same(undetected):
    call = inputs.stable(1, 10, 1)
    assert any(NPU in reason and "KDA_EMULATE=1" in reason for reason in backends.status()["pypto"])
    with pytest.raises(NotImplementedError, match="there is no NPU"):
        kda.chunk_kda(**call, backend="pypto")


@pytest.mark.parametrize("tool, named", [("cmake", "cmake .`pip install cmake`."), ("c++", "a C[+][+] compiler")])
def test_without_the_tools_to_build_the_interpreter_it_says_so(undetected, monkeypatch, tmp_path, tool, named):
    pytest.importorskip("pypto", reason="its version names the cache")
    absent = {"cmake"} if tool == "cmake" else {"c++", "g++"}
    monkeypatch.setenv("KDA_EMULATE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(detect.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if name in absent else f"/usr/bin/{name}")
    with pytest.raises(NotImplementedError, match=f"has to be built once, and PATH lacks {named}$"):
        kda.chunk_kda(**inputs.stable(1, 10, 1), backend="pypto")
    calculator._built().parent.mkdir(parents=True)
    calculator._built().touch()
    assert calculator.missing_tools() is None, "what is built needs no tools"


def test_a_build_that_fails_shows_the_compilers_words():
    with pytest.raises(RuntimeError, match=r"could not be built.*\n.*out of luck"):
        calculator._run([sys.executable, "-c", "import sys; sys.exit('out of luck')"])


# ---- which calls it takes


def test_all_reasons_come_at_once(monkeypatch):
    monkeypatch.delenv("KDA_EMULATE", raising=False)
    call = normalise("chunk_kda", **inputs.stable(1, 10, 1, 16, 32, dtype=torch.float64))
    reasons = pypto_backend.refuses(call)
    assert reasons == [
        "its tensors must be on npu, got cpu", "it computes in float32, got float64", "K must be 64 or 128, got 16",
        "V must be 64 or 128, got 32",
    ]  # fmt: skip


def test_tensors_past_int32_are_refused(monkeypatch):
    monkeypatch.setenv("KDA_EMULATE", "1")
    monkeypatch.setattr(pypto_backend, "missing_interpreter", lambda: None)
    small = inputs.stable(1, 1, 1)
    for T, reasons in ((2**24 - 1, 0), (2**24, 1)):
        call = {name: x.expand(1, T, *x.shape[2:]) if isinstance(x, Tensor) else x for name, x in small.items()}
        assert len(pypto_backend.refuses(normalise("chunk_kda", **call))) == reasons
    pool = small | {"ssm_state_indices": torch.ones(1, dtype=torch.int32)}
    for slots, reasons in ((2**17 - 1, 0), (2**17, 1)):
        pool["initial_state"] = torch.zeros(1).expand(slots, 1, 128, 128)
        assert len(pypto_backend.refuses(normalise("fused_recurrent_kda", **pool))) == reasons
    each_token = small | {
        name: small[name].expand(1, 2**17, *small[name].shape[2:]) for name in ("q", "k", "v", "g", "beta")
    }
    each_token |= {
        "initial_state": torch.zeros(2, 1, 128, 128),
        "ssm_state_indices": torch.ones(1, 2**17, dtype=torch.int32),
    }
    assert len(pypto_backend.refuses(normalise("fused_recurrent_kda", **each_token))) == 1


# ---- what the host does


def test_the_host_reads_no_tensor_value(monkeypatch):
    """On meta tensors, which have none, everything but the kernel itself runs; and the kernel gets what it expects."""
    pytest.importorskip("pypto")
    launch, pool = pypto_backend._host("launch"), pypto_backend._host("pool")
    launched = []
    for module in (launch, pool):
        monkeypatch.setattr(module, "run", lambda body, ins, outs, config: launched.append((body, ins, outs)))
    packed = inputs.raw(1, 9, 2, HV=4, lengths=[4, 0, 5], initial_state=True)
    strided = torch.zeros(9, 4, 128, 144)[..., :128]
    slots = torch.tensor([[1, 2, 3, 4, 5], [6, 6, 6, 6, 6], [0, 1, 2, 3, 4]])
    calls = [
        ("chunk_kda", packed), ("chunk_kda", inputs.stable(3, 5, 1)), ("fused_recurrent_kda", packed),
        ("fused_recurrent_kda", {**packed, "inplace_final_state": True}),
        ("fused_recurrent_kda", {**packed, "initial_state": strided, "ssm_state_indices": slots,
                                 "num_accepted_tokens": torch.ones(3, dtype=torch.int64)}),
        ("fused_recurrent_kda", {**packed, "initial_state": strided, "ssm_state_indices": slots,
                                 "inplace_final_state": True}),
        ("fused_recurrent_kda", {**packed, "initial_state": strided, "ssm_state_indices": slots[:, 0]}),
    ]  # fmt: skip
    for op, arguments in calls:
        on_meta = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in arguments.items()}
        if arguments.get("initial_state") is strided:
            on_meta["initial_state"] = torch.zeros(9, 4, 128, 144, device="meta")[..., :128]
        o, _ = getattr(pypto_backend, op)(normalise(op, **on_meta))
        assert o.is_meta and o.shape == arguments["v"].shape
        body, ins, outs = launched.pop()
        assert body.__name__ == op
        assert all(x.is_meta and x.is_contiguous() for x in (*ins, *outs))
        assert all(x.dtype == torch.int32 for x in ins if not x.is_floating_point())
    assert not launched


def test_a_call_without_tokens_runs_no_kernel(monkeypatch):
    pytest.importorskip("pypto")
    for module in ("launch", "pool"):
        monkeypatch.setattr(pypto_backend._host(module), "run", lambda *_: pytest.fail("a kernel ran"))
    call = inputs.stable(1, 0, 1, lengths=[0, 0], initial_state=True)
    start = call["initial_state"]
    for op in ("chunk_kda", "fused_recurrent_kda"):
        o, state = getattr(pypto_backend, op)(normalise(op, **call))
        assert o.shape == call["v"].shape and torch.equal(state, start) and state is not start
    pooled = {**call, "ssm_state_indices": torch.tensor([1, 0])}
    _, state = pypto_backend.fused_recurrent_kda(normalise("fused_recurrent_kda", **pooled))
    assert torch.equal(state[0], start[1]) and not state[1].any()
    _, state = pypto_backend.fused_recurrent_kda(normalise("fused_recurrent_kda", **pooled, inplace_final_state=True))
    assert state is start


@in_its_own_process
def test_pypto_leaves_the_root_logger_alone() -> None:
    assert "pypto" not in sys.modules
    pypto_backend._host("launch")
    assert "pypto" in sys.modules
    assert logging.getLogger().level == logging.WARNING and not logging.getLogger().handlers


# ---- the constants


def test_levels_part_the_strict_lower_triangle():
    C = constants.CHUNK
    blocks = constants.masks(torch.device("cpu")).view(-1, C, C)
    levels = blocks[: len(constants.HALVES)].sum(0)
    assert torch.equal(levels, torch.ones(C, C).tril(-1))
    assert torch.equal(blocks[constants.IDENTITY], torch.eye(C))
    ones = torch.ones(SUB_BLOCK, SUB_BLOCK)
    assert torch.equal(blocks[constants.LEAF], torch.block_diag(*[ones] * (C // SUB_BLOCK)))


def test_decay_sums_meet_at_the_borders():
    """For every pair of rows, the two sums of its level are together what lies between the rows."""
    C, cpu = constants.CHUNK, torch.device("cpu")
    g = torch.rand(C, dtype=torch.float64)
    G = g.cumsum(0)
    sums = (constants.decay_sums(cpu).double() @ g).view(-1, C)
    masks = constants.masks(cpu).view(-1, C, C)
    for level in range(len(constants.HALVES)):
        i, j = masks[level].nonzero().unbind(1)
        torch.testing.assert_close(sums[level, i] + sums[level, j], G[i] - G[j])
    torch.testing.assert_close(sums[constants.FROM_START], G)
    torch.testing.assert_close(sums[constants.TO_END], G[-1] - G)


# ---- through the front end


@pytest.mark.parametrize(
    "ids",
    [
        "L0 U0 V0 V1 V2 V3 T37 GVA EMPTY",
        "GMIX G-5 COLLINEAR CANCEL SOFTPLUS POISON STRIDES ALIAS",
        "RECURRENT DECODE POOL SPECULATE",
    ],
)
@in_its_own_process
def test_gates(ids: str) -> None:
    for id in ids.split():
        result = run_case(CASES[id], "pypto", "cpu", torch.bfloat16)
        assert result.outcome == "passed", (id, result.reason, [f.text for f in result.findings if not f.ok])


def test_the_gates_take_the_npu_that_pyptos_variable_names(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type="npu"))
    monkeypatch.delenv("KDA_EMULATE", raising=False)
    monkeypatch.delenv("TILE_FWK_DEVICE_ID", raising=False)
    assert command._default_device() == "npu:0"
    monkeypatch.setenv("TILE_FWK_DEVICE_ID", "3")
    assert command._default_device() == "npu:3"
    monkeypatch.setenv("KDA_EMULATE", "1")
    assert command._default_device() == "cpu"


@in_its_own_process
def test_a_gradient_comes_from_torch() -> None:
    call = inputs.stable(1, 20, 1, dtype=torch.float32)
    grads = []
    for backend in ("torch", "pypto"):
        q = call["q"].clone().requires_grad_()
        o, _ = kda.chunk_kda(**{**call, "q": q}, backend=backend)
        o.square().sum().backward()
        grads.append(q.grad)
    assert grads[0].abs().max() > 0 and golden.rel_rmse(grads[1], grads[0]) < 1e-5


@in_its_own_process
def test_inputs_keep_their_bits() -> None:
    call = inputs.raw(1, 130, 1, initial_state=True)
    before = {name: x.clone() for name, x in call.items() if isinstance(x, Tensor)}
    kda.chunk_kda(**call, backend="pypto")
    assert all(torch.equal(call[name], x) for name, x in before.items())


@pytest.mark.npu
@pytest.mark.parametrize("id", [id for id, case in CASES.items() if not case.slow])
def test_gates_on_an_npu(id: str) -> None:
    if reasons := backends.unusable("pypto"):
        pytest.skip("; ".join(reasons))
    result = run_case(CASES[id], "pypto", command._default_device(), torch.bfloat16)
    assert result.outcome in ("passed", "skipped"), (result.reason, [f.text for f in result.findings if not f.ok])
