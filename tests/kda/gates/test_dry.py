"""A dry pass over the cases finds their calls, computes nothing, and leaves no trace in the real ones."""

from __future__ import annotations

import resource
import time

import pytest
import torch
from fake_backends import FakeBackend
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from kda.backends.call import DIFFERENTIABLE, KdaCall
from kda.gates.case import Case, Run, run_case
from kda.gates.command import CASES
from kda.gates.dry import calls_of
from kda.gates.shapes import TAILS

CPU = torch.device("cpu")


def found(*ids: str, backend: str = "torch", dtype: torch.dtype = torch.bfloat16) -> list[KdaCall]:
    return calls_of([CASES[id] for id in ids], backend, CPU, dtype)


def described(call: KdaCall) -> tuple:
    tensors = {name: getattr(call, name) for name in KdaCall.__dataclass_fields__ if name != "memo"}
    return tuple(
        (x.shape, x.stride(), x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else x
        for x in tensors.values()
    )


class Noting(FakeBackend):
    """The torch backend's results, and a note of every call."""

    def run(self, call: KdaCall) -> tuple[Tensor, Tensor | None]:
        from kda import backends

        return getattr(backends.load("torch"), call.op)(call)


def test_the_calls_are_those_of_the_case(register) -> None:
    ids = ("L0", "V0", "V2", "T37", "TAILS", "LAYOUT", "GVA", "STRIDES", "SOFTPLUS", "RECURRENT", "SPECULATE", "POOL",
           "STATES16",
           "GRAD-RAW", "GRAD-PACKED", "GRAD-STATES")  # fmt: skip
    noting = register("noting", Noting())
    for id in ids:
        del noting.calls[:]
        assert run_case(CASES[id], "noting", CPU, torch.bfloat16).outcome == "passed", id
        assert [*map(described, found(id, backend="noting"))] == [*map(described, noting.calls)], id


def test_calls_have_no_values_and_a_memo_of_their_own() -> None:
    (call,) = found("V2")
    assert isinstance(call.q, FakeTensor) and call.cu_seqlens.shape == (4,) and call.q.dtype == torch.bfloat16
    call.memo["spoiled"] = call.q
    (again,) = found("V2")
    assert "spoiled" not in again.memo
    assert [c.T for c in found("TAILS", dtype=torch.float16)] == [*TAILS]


def test_gradients_are_asked_of_tensors_that_require_them() -> None:
    (training,) = found("GRAD-STATES")
    asked = [name for name in DIFFERENTIABLE if (x := getattr(training, name)) is not None and x.requires_grad]
    assert asked == ["q", "k", "v", "g", "beta", "A_log", "dt_bias"] and not training.output_final_state
    assert found("GRAD-LAYOUT")[0].initial_state.requires_grad and not found("L0")[0].q.requires_grad


def test_every_case_is_gone_through_at_once_and_nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "needs_memory", lambda run, gigabytes: None)
    found("L0")  # torch imports much for its first fake tensor
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    calls = {id: len(found(id)) for id in CASES}
    assert time.process_time() - start < 0.5 * len(CASES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB; L3 and INDEX32 take gigabytes
    assert {id for id, count in calls.items() if not count} == {"CANCEL", "GRAPH"}, "their inputs need values, or a GPU"


def test_what_the_backend_refuses_or_never_sees_is_left_out(register) -> None:
    backend = register("fake", FakeBackend())
    assert len(found("L0", backend="fake")) == 1
    backend.refusals.append("not today")
    assert found("L0", backend="fake") == []

    def without_tokens(run: Run) -> None:
        run.chunk_kda(**run.stable(1, 0, 2))

    assert calls_of([Case("X", "", without_tokens, slow=False)], "torch", CPU, torch.float32) == []


def test_a_case_that_fails_costs_no_other_its_calls() -> None:
    def broken(run: Run) -> None:
        raise RuntimeError("launch failed")

    cases = [CASES["L0"], Case("X", "", broken, slow=False), CASES["U0"]]
    assert [call.T for call in calls_of(cases, "torch", CPU, torch.bfloat16)] == [128, 384]


def test_the_real_calls_do_not_notice() -> None:
    found("L0", "RECURRENT")
    assert run_case(CASES["L0"], "torch", CPU, torch.bfloat16).outcome == "passed"
    assert run_case(CASES["RECURRENT"], "torch", CPU, torch.bfloat16).outcome == "passed"
