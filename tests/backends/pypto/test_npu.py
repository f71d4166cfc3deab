"""The PyPTO backend on NPU tensors, up to the launch: a fake device, whose memory is the CPU's, and the interpreter.

It shows that dispatch, devices, streams, layouts, gradients, graphs, threads and the commands work with tensors on
`npu`. What a launch does on an NPU it cannot show.
"""

from __future__ import annotations

import sys
import threading

import fake_npu
import pytest
import torch
from pypto_process import in_its_own_process
from torch import Tensor

import kda
from kda import backends, golden
from kda.golden import inputs, rel_rmse

pytestmark = pytest.mark.usefixtures("fake_npu_library")

LIMITS = {torch.float32: 2e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}


def on(device: str, call: dict) -> dict:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in call.items()}


def agree(op: str, call: dict, device: str) -> None:
    """A call that names no backend runs on its device and stream, without a look at a value, and is right."""
    o, state = golden.recurrent_kda_golden(**call)
    assert o.abs().max() > 0 and state.abs().max() > 0
    there, before, launched = on(device, call), fake_npu.reads(), len(fake_npu.LAUNCHES)
    found_o, found_state = getattr(kda, op)(**there)
    assert fake_npu.reads() == before, "the host has read a value"
    assert len(fake_npu.LAUNCHES) == launched + 1
    launch, wanted = fake_npu.LAUNCHES[-1], torch.device(device)
    assert launch.device == wanted.index and launch.stream == 0x1000 + wanted.index
    assert all(x.device == wanted and x.is_contiguous() for x in launch.tensors)
    assert found_o.device == found_state.device == wanted and found_o.dtype == call["q"].dtype
    assert rel_rmse(found_o.cpu(), o) < LIMITS[call["q"].dtype]
    assert rel_rmse(found_state.cpu(), state) < LIMITS[torch.float32]


@in_its_own_process
def test_calls() -> None:
    fake_npu.install()
    assert backends.status()["pypto"] == []
    for dtype in LIMITS:
        packed = inputs.raw(1, 150, 1, HV=2, lengths=[50, 0, 100], dtype=dtype, initial_state=True)
        agree("chunk_kda", packed, "npu:0")
        agree("fused_recurrent_kda", inputs.raw(1, 5, 1, HV=2, lengths=[2, 3], dtype=dtype), "npu:0")
    assert fake_npu.current() == 0
    agree("chunk_kda", packed, "npu:1")
    agree("fused_recurrent_kda", inputs.raw(1, 5, 1, initial_state=True, dtype=torch.bfloat16), "npu:1")
    assert fake_npu.current() == 0, "the other device was current for the launch alone"
    strided = {name: x.mT.contiguous().mT if name in ("q", "k", "v", "g") else x for name, x in packed.items()}
    agree("chunk_kda", strided, "npu:0")


@in_its_own_process
def test_pools() -> None:
    """In place, and with drafts; contiguous and with gaps in memory."""
    fake_npu.install()
    call = inputs.stable(1, 7, 1, lengths=[3, 1, 0, 3], dtype=torch.float32)
    slots = torch.tensor([[1, 2, 3], [4, 2, 2], [6, 7, 8], [9, 0, 10]], dtype=torch.int32)
    drafts = {"ssm_state_indices": slots, "num_accepted_tokens": torch.tensor([3, 1, 1, 3], dtype=torch.int32)}
    for indices in ({"ssm_state_indices": torch.tensor([5, 0, 8, -3])}, drafts):
        for gap in (0, 16):
            pool = torch.randn(11, 1, 128, 128 + gap, generator=torch.Generator().manual_seed(0))[..., :128]
            there = pool.to("npu") if gap == 0 else torch.empty(11, 1, 128, 144, device="npu")[..., :128].copy_(pool)
            o, states = golden.recurrent_kda_golden(**call, **indices, initial_state=pool, inplace_final_state=True)
            before = fake_npu.reads()
            arguments = {**on("npu", {**call, **indices}), "initial_state": there, "inplace_final_state": True}
            found_o, found = kda.fused_recurrent_kda(**arguments)
            assert fake_npu.reads() == before and found is there
            assert rel_rmse(found_o.cpu(), o) < 2e-6 and rel_rmse(there.cpu(), states) < 2e-6


@in_its_own_process
def test_gradients_of_all_inputs() -> None:
    fake_npu.install()
    call = inputs.raw(1, 40, 1, dtype=torch.float32, initial_state=True)
    grads: dict[str, dict[str, Tensor]] = {}
    for device in ("cpu", "npu:1"):
        leaves = {name: x.detach().requires_grad_() for name, x in on(device, call).items() if isinstance(x, Tensor)}
        o, state = kda.chunk_kda(**{**call, **leaves})
        (o.square().sum() + state.square().sum()).backward()
        grads[device] = {name: x.grad for name, x in leaves.items()}
    assert grads["cpu"].keys() == {"q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"}
    for name, expected in grads["cpu"].items():
        found = grads["npu:1"][name]
        assert str(found.device) == "npu:1" and expected.abs().max() > 0
        assert rel_rmse(found.cpu(), expected) < 2e-6, name


@in_its_own_process
def test_torch_compile() -> None:
    """One graph forward and one backward, with eager's results."""
    fake_npu.install()
    call = on("npu", inputs.raw(1, 40, 1, dtype=torch.float32))

    def run(q: Tensor) -> Tensor:
        return kda.chunk_kda(**{**call, "q": q})[0] * 2.0

    results = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        q = call["q"].clone().requires_grad_()
        o = function(q)
        o.square().sum().backward()
        results.append((o.detach().cpu(), q.grad.cpu()))
    for eager, compiled in zip(*results, strict=True):
        assert eager.abs().max() > 0 and torch.equal(eager, compiled)


@in_its_own_process
def test_threads_launch_their_own_configuration() -> None:
    """Two scales and two sizes from two threads, which change as often as they can: 200 launches."""
    fake_npu.install()
    from pypto.frontend.parser import entry

    kernels: set[int] = set()
    wrong = []

    def launch(kernel: object, stream: int, tensors: list[Tensor], definitions: object) -> None:
        kernels.add(id(kernel))
        if kernel.kwargs["config"].scale != tensors[0].flatten()[0].item():  # each thread has its scale for its q
            wrong.append(kernel.kwargs["config"])

    def calls(scale: float) -> None:
        call = on("npu", inputs.raw(1, 8, 1, dtype=torch.float32))
        call |= {"q": torch.full_like(call["q"], scale), "scale": scale}
        for _ in range(100):
            kda.chunk_kda(**call)

    entry.pypto_impl.LaunchKernelTorch = launch
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=calls, args=(scale,)) for scale in (0.5, 0.25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(kernels) == 2


@in_its_own_process
def test_gates() -> None:
    fake_npu.install()
    from kda.gates.case import run_case
    from kda.gates.command import CASES

    for id in ("L0", "V1", "T37", "POOL", "SPECULATE"):
        result = run_case(CASES[id], "pypto", torch.device("npu:0"), torch.bfloat16)
        assert result.outcome == "passed", (id, result.reason, [f.text for f in result.findings if not f.ok])


@in_its_own_process
def test_commands() -> None:
    fake_npu.install()
    import contextlib
    import io

    from pypto.frontend.parser import entry

    from kda.bench import measure
    from kda.cli import main

    def said(*arguments: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main([*arguments]) == 0
        return " ".join(out.getvalue().split())

    info = said("info")
    assert "npu:1 Ascend910B2 (a fake)" in info and "cann 9.0.0" in info
    assert "pypto usable here" in info and "pypto for tensors on npu" in info
    assert "Device npu:0, bfloat16 Backend pypto" in said("demo", "--prefill", "130", "--decode", "3")
    entry.pypto_impl.LaunchKernelTorch = lambda *_: None
    measure.WARM_UP, measure.RUNS, measure.HOST_RUNS = 1, 1, 1
    measure.ceilings = lambda *_: measure.Ceilings(copy=1e12, matmul=1e14)  # which would take the CPU minutes
    assert "npu" in said("bench", "--device", "npu", "--case", "T64", "B1")


@pytest.mark.slow
@in_its_own_process
def test_a_report_of_a_first_run() -> None:
    """The gates, versions, and a time beside the model's: the command that an NPU's owner is asked to run."""
    fake_npu.install()
    import tempfile
    from pathlib import Path

    from kda.bench import measure, model
    from kda.bench.cases import Case
    from kda.cli import main
    from kda.gates import report

    measure.WARM_UP, measure.RUNS = 1, 1
    model.SMALL["short"], report.TIMED = Case("short", 1, (64,)), ("short",)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "first_run.txt"
        assert main(["gate", "--backend", "pypto", "--case", "T37", "--report", str(file)]) == 0
        lines = [" ".join(line.split()) for line in file.read_text().splitlines()]
    assert lines[0] == "python -m kda gate --report: backend pypto on npu:0, bf16"
    text = "\n".join(lines)
    assert "npu:1 Ascend910B2 (a fake)" in text and "cann 9.0.0" in text and "1 passed in" in text
    (row,) = (line.split() for line in lines if line.startswith("short "))
    assert row[:3] == ["short", "1", "64"] and len(row) == 5, row
    assert all(float(ms) > 0 for ms in row[3:]), "measured, and in the model"


@in_its_own_process
def test_a_cann_that_does_not_fit_is_named() -> None:
    fake_npu.install(cann="9.1.0")
    (reason,) = backends.status()["pypto"]
    assert reason == "the kernels are for PyPTO 0.2 with CANN 9.0, got CANN 9.1.0"
    with pytest.warns(RuntimeWarning, match=r"CANN 9\.1\.0.*using torch instead"):
        kda.chunk_kda(**on("npu", inputs.stable(1, 5, 1, dtype=torch.float32)))
    assert not fake_npu.LAUNCHES
