"""The TileLang kernels on the device: the gates, the launch path, and flash-linear-attention's answers beside ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kda
from kda.gates.case import run_case
from kda.gates.command import CASES
from kda.golden import inputs, recurrent_kda_golden, rel_rmse

FAST = [id for id, case in CASES.items() if not case.slow]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("id", FAST)
def test_gate(id: str, dtype: torch.dtype) -> None:
    result = run_case(CASES[id], "tilelang", "cuda", dtype)
    if result.outcome == "refused":
        pytest.skip(result.reason)
    assert result.outcome == "passed", (result.reason, [f.text for f in result.findings if not f.ok])


def test_30_runs_give_one_set_of_bits() -> None:
    call = inputs.raw(1, 1000, 4, lengths=[100, 0, 900], initial_state=True, device="cuda")
    o, state = kda.chunk_kda(**call, backend="tilelang")
    for _ in range(30):
        again_o, again_state = kda.chunk_kda(**call, backend="tilelang")
        assert torch.equal(again_o, o) and torch.equal(again_state, state)


def test_runs_on_the_current_stream() -> None:
    """The inputs are written late on a side stream; a launch on any other stream would read them too early."""
    call = inputs.stable(1, 256, 2, device="cuda")
    expected, _ = kda.chunk_kda(**call, backend="tilelang")
    late = torch.zeros_like(call["v"])
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(call["v"])
        o, _ = kda.chunk_kda(**call | {"v": late}, backend="tilelang")
    stream.synchronize()
    assert torch.equal(o, expected)


def test_auto_takes_it_and_compiles() -> None:
    call = inputs.raw(1, 200, 2, device="cuda")
    expected, _ = kda.chunk_kda(**call, backend="tilelang")
    o, _ = torch.compile(lambda **c: kda.chunk_kda(**c), fullgraph=True)(**call)
    assert torch.equal(o, expected)


def test_gradient_comes_from_torch() -> None:
    call = inputs.stable(1, 100, 2, device="cuda")
    gradients = []
    for backend in ("torch", "tilelang"):
        v = call["v"].clone().requires_grad_()
        kda.chunk_kda(**call | {"v": v}, backend=backend)[0].float().square().sum().backward()
        gradients.append(v.grad)
    assert rel_rmse(gradients[1], gradients[0]) < 1e-2  # the loss saw outputs that differ by rounding


@pytest.mark.parametrize("state_v_first", [True, False])
@pytest.mark.parametrize("safe_gate", [True, False])
def test_agrees_with_fla_and_is_no_worse(safe_gate: bool, state_v_first: bool) -> None:
    fla = pytest.importorskip("fla.ops.kda")
    options: dict[str, Any] = {"state_v_first": state_v_first, "initial_state": True}
    call = inputs.raw(1, 1024, 2, lower_bound=-5.0, device="cuda", **options)
    o, state = kda.chunk_kda(**call, backend="tilelang")
    fla_o, fla_state = fla.chunk_kda(**call, safe_gate=safe_gate)
    true_o, true_state = recurrent_kda_golden(**call)
    assert rel_rmse(o, fla_o) <= 5e-3 and rel_rmse(state, fla_state) <= 5e-3
    assert rel_rmse(o, true_o) <= 1.02 * rel_rmse(fla_o, true_o)
    assert rel_rmse(state, true_state) <= 1.02 * rel_rmse(fla_state, true_state)


def test_collinear_keys_are_no_worse_than_flas() -> None:
    fla = pytest.importorskip("fla.ops.kda")
    call = inputs.collinear(1, 512, 2, device="cuda")
    o, state = kda.chunk_kda(**call, backend="tilelang")
    fla_o, fla_state = fla.chunk_kda(**call)
    true_o, true_state = recurrent_kda_golden(**call)
    print(f"o {rel_rmse(o, true_o):.2e} against FLA's {rel_rmse(fla_o, true_o):.2e}, "
          f"state {rel_rmse(state, true_state):.2e} against {rel_rmse(fla_state, true_state):.2e}")  # fmt: skip
    assert rel_rmse(o, true_o) <= rel_rmse(fla_o, true_o)
    assert rel_rmse(state, true_state) <= rel_rmse(fla_state, true_state)
