"""The PyPTO backend through the front end: gradients, the gates that the interpreter can run, all of them on an NPU."""

from __future__ import annotations

import argparse

import pytest
import torch
from pypto_process import in_its_own_process
from torch import Tensor

import kda
from kda import backends, golden
from kda.cli import options
from kda.gates.case import run_case
from kda.gates.command import CASES
from kda.golden import inputs


@pytest.mark.parametrize(
    "ids",
    [
        "L0 U0 V0 V1 V2 V3 T37 GVA EMPTY",
        "GMIX G-5 COLLINEAR CANCEL SOFTPLUS POISON STRIDES ALIAS",
        "RECURRENT DECODE POOL SPECULATE CHUNKPOOL STATES16",
    ],
)
@in_its_own_process
def test_gates(ids: str) -> None:
    for id in ids.split():
        result = run_case(CASES[id], "pypto", torch.device("cpu"), torch.bfloat16)
        assert result.outcome == "passed", (id, result.reason, [f.text for f in result.findings if not f.ok])


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
    device = options.device(argparse.Namespace(device=None))
    result = run_case(CASES[id], "pypto", device, torch.bfloat16)
    assert result.outcome in ("passed", "skipped"), (result.reason, [f.text for f in result.findings if not f.ok])
