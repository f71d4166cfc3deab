"""A backend of one's own, added as docs/golden.md tells: it passes gates, says what it does not take, and goes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import kda
from kda import backends
from kda.backends.call import KdaCall
from kda.cli import main
from kda.gates.case import run_case
from kda.gates.command import CASES
from kda.golden import chunk_kda_golden, inputs, recurrent_kda_golden, rel_rmse

CPU = torch.device("cpu")
GATES = ("L0", "U0", "TAILS", "SCALE", "COLLINEAR", "DETERMINISM")


class Toy:
    """The golden, for sequences of one length whose inputs need no activation."""

    about = "the golden as a backend"
    differentiable = False
    takes = frozenset(("scale", "initial_state", "output_final_state"))

    def unusable(self) -> list[str]:
        return []

    def refuses(self, call: KdaCall) -> list[str]:
        return []

    def chunk_kda(self, call: KdaCall) -> tuple[Tensor, Tensor | None]:
        form = chunk_kda_golden if call.op == "chunk_kda" else recurrent_kda_golden
        o, state = form(call.q, call.k, call.v, call.g, call.beta, call.scale, call.initial_state, True)
        return o.to(call.v.dtype), state.float() if call.output_final_state else None

    fused_recurrent_kda = chunk_kda

    def stages(self, call: KdaCall) -> dict[str, Tensor]:
        return {}


@pytest.fixture
def toy(plain_environment: None) -> Iterator[None]:
    backends.register("toy", Toy())
    yield
    if "toy" in backends.names():
        backends.unregister("toy")


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("id", GATES)
def test_it_passes_gates(id: str) -> None:
    result = run_case(CASES[id], "toy", CPU, torch.bfloat16)
    assert result.outcome == "passed", (result.reason, [f.text for f in result.findings if not f.ok])


@pytest.mark.usefixtures("toy")
def test_it_passes_gates_by_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "--backend", "toy", "--device", "cpu", "--case", *GATES[:3], "V1"]) == 0
    out = capsys.readouterr().out
    assert "backend toy on cpu, bf16" in out and "3 passed, 1 refused" in out
    assert "V1 refused: backend 'toy' cannot take this chunk_kda call: it does not take cu_seqlens" in out


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_it_takes_both_operators_and_gradients_are_torchs(operator) -> None:
    call = inputs.stable(2, 20, 2, 16, dtype=torch.float32, initial_state=True)
    grads = []
    for backend in ("toy", "torch"):
        v = call["v"].clone().requires_grad_()
        o, state = operator(**call | {"v": v}, backend=backend)
        (o.sum() + state.sum()).backward()
        grads.append(v.grad)
    torch.testing.assert_close(*grads)
    expected_o, expected_state = recurrent_kda_golden(**call)
    o, state = operator(**call, backend="toy")
    assert rel_rmse(o, expected_o) < 1e-6 and rel_rmse(state, expected_state) < 1e-6


@pytest.mark.usefixtures("toy")
def test_what_it_does_not_take_is_refused_by_name() -> None:
    call = inputs.raw(1, 20, 2, 16, lengths=[5, 15], state_v_first=False)
    with pytest.raises(NotImplementedError) as error:
        kda.chunk_kda(**call, backend="toy")
    assert str(error.value) == (
        "backend 'toy' cannot take this chunk_kda call: it does not take use_qk_l2norm_in_kernel, "
        "use_gate_in_kernel, use_beta_sigmoid_in_kernel, A_log, dt_bias, cu_seqlens, state_v_first"
    )


def test_once_unregistered_it_is_gone(toy: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert backends.names() == ("tilelang", "pypto", "torch", "toy") and backends.status()["toy"] == []
    backends.unregister("toy")
    assert backends.names() == ("tilelang", "pypto", "torch") and "toy" not in backends.status()
    with pytest.raises(ValueError, match=r"^backend: expected one of auto, tilelang, pypto, torch, got 'toy'$"):
        kda.chunk_kda(**inputs.stable(1, 5, 1, 16), backend="toy")
    assert main(["gate", "--backend", "toy", "--case", "L0"]) == 2
    assert "got 'toy'" in capsys.readouterr().err
