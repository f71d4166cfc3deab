"""The gates of gradients: a backward pass that is broken turns its cases red, and the stage at fault is named."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from broken_stages import WITHOUT_BETA
from fake_backends import WithoutBackward
from torch import Tensor

from kda import golden
from kda.backends.call import ARGUMENTS, DIFFERENTIABLE, KdaCall
from kda.gates.case import GRADIENTS, Result, Run, run_case
from kda.gates.command import CASES
from kda.gates.gradients import FP32_LIMIT, outer_gradients
from kda.golden import stages

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
Gradients = dict[str, Tensor]


class Tampered(WithoutBackward):
    """The torch backend with the golden's gradients, and something done to what they are made of or to themselves."""

    def __init__(
        self, after: Callable[[Gradients], Any] = lambda found: None, before: Callable[..., Any] = lambda *ds: ds
    ) -> None:
        super().__init__()
        self.after, self.before = after, before

    def chunk_kda_backward(
        self, call: KdaCall, wanted: Collection[str], d_o: Tensor, d_final_state: Tensor | None
    ) -> Gradients:
        arguments = {a.name: getattr(call, a.name) for a in ARGUMENTS["chunk_kda"] if not a.written}
        found = golden.chunk_kda_backward_golden(*self.before(d_o, d_final_state), **arguments)
        self.after(found)
        return {name: found[name].to(getattr(call, name).dtype) for name in wanted}


class ReadingThePadding(Tampered):
    def chunk_kda_backward(self, call: KdaCall, wanted: Collection[str], d_o: Tensor, *rest: Any) -> Gradients:
        found = super().chunk_kda_backward(call, wanted, d_o, *rest)
        return found | {"v": found["v"] + 0 * d_o.view(found["v"].shape)}


def shifted_dg(found: Gradients) -> None:
    found["g"] = found["g"].roll(1, 1)


def states_with_channels_in_another_order(found: Gradients) -> None:
    if "initial_state" in found:
        found["initial_state"] = found["initial_state"].flip(-2)


def a_nan_in_dv(found: Gradients) -> None:
    found["v"][0, 0, 0, 5] = float("nan")


def without_the_final_states(d_o: Tensor, d_final_state: Tensor) -> tuple[Tensor, None]:
    return d_o, None


def garbage_on_the_padding(found: Gradients) -> None:
    found["k"][:, -1] = 1.0


def no_more_than_fp16_holds(found: Gradients) -> None:
    for x in found.values():
        x.clamp_(-65504, 65504)


def other_heads(found: Gradients) -> None:
    found["q"] = found["q"].flip(2)


def wrong_A_log(found: Gradients) -> None:
    if "A_log" in found:
        found["A_log"] *= 1.02


def other_bits(found: Gradients) -> None:
    found["beta"] *= 1 + 1e-4 * torch.rand(1).item()


def outcome(id: str, dtype: torch.dtype = torch.bfloat16) -> Result:
    return run_case(CASES[id], "tampered", CPU, dtype)


def departures(result: Result) -> list[str]:
    return [f.text.removeprefix("first stage that departs: ") for f in result.findings if f.what.endswith("stage")]


@pytest.mark.parametrize(
    ("backend", "red", "green", "named"),
    [
        (Tampered(shifted_dg), ["GRAD-STATES", "GRAD-PACKED"], [], "dM1 (dg)"),
        (Tampered(states_with_channels_in_another_order), ["GRAD-LAYOUT"], ["GRAD-STATES"], "dM4 (d_initial_state)"),
        (Tampered(a_nan_in_dv), ["GRAD-LAYOUT", "GRAD-ALIKE"], [], "dM2 (dv)"),
        (Tampered(before=without_the_final_states), ["GRAD-GVA"], ["GRAD-STATES"], "dM2 (dv)"),
        (Tampered(garbage_on_the_padding), ["GRAD-PACKED"], [], "dM1 (dk)"),
        (ReadingThePadding(), ["GRAD-PACKED"], ["GRAD-LAYOUT"], "dM2 (dv)"),
        (Tampered(no_more_than_fp16_holds), ["GRAD-SCALE"], ["GRAD-LAYOUT"], "dM2 (dv)"),
        (Tampered(other_heads), ["GRAD-GVA"], ["GRAD-LAYOUT"], "dM1 (dq)"),
        (Tampered(wrong_A_log), ["GRAD-RAW"], ["GRAD-GVA"], "dM1 (dA_log)"),
    ],
    ids=lambda x: getattr(getattr(x, "after", None), "__name__", None),
)
def test_a_broken_backward_pass_turns_its_cases_red(register, backend, red, green, named) -> None:
    register("tampered", backend)
    for id in red:
        result = outcome(id)
        assert result.outcome == "failed" and not result.reason, (id, result.reason)
        assert set(departures(result)) == {named}, id
    for id in green:
        assert outcome(id).outcome == "passed", id


def test_a_pass_whose_bits_change_is_seen(register) -> None:
    register("tampered", Tampered(other_bits))
    result = outcome("GRAD-BITS")
    assert [f.what for f in result.findings if not f.ok] == ["dbeta"]
    assert outcome("GRAD-LAYOUT").outcome == "passed"


def test_fp32_is_held_to_more(register) -> None:
    register("tampered", Tampered(lambda found: found["q"].mul_(1 + 2 * FP32_LIMIT)))
    assert outcome("GRAD-LAYOUT").outcome == "passed"
    assert departures(outcome("GRAD-LAYOUT", torch.float32)) == ["dM1 (dq)"]
    register("tampered", Tampered())
    assert outcome("GRAD-LAYOUT", torch.float32).outcome == "passed"


def test_where_the_forward_stages_depart_already_they_are_named(register, monkeypatch: pytest.MonkeyPatch) -> None:
    class WithTables(Tampered):
        def stages(self, call: KdaCall) -> dict[str, Tensor]:
            with monkeypatch.context() as patch:
                patch.setattr(stages, *WITHOUT_BETA)
                return golden.chunk_kda_stages(
                    **{a.name: getattr(call, a.name) for a in ARGUMENTS["chunk_kda"] if not a.written}
                )

    register("tampered", WithTables(shifted_dg))
    (named,) = departures(outcome("GRAD-LAYOUT"))
    assert named.startswith("M2 (Akk")


def test_gradients_are_asked_for_in_the_order_of_the_stages() -> None:
    assert set(GRADIENTS) == set(DIFFERENTIABLE)
    made_by = [text.partition(" ")[0] for text in GRADIENTS.values()]
    assert made_by == sorted(made_by, reverse=True) and {"dM4", "dM2", "dM1"} == set(made_by)


def test_a_call_without_a_final_state_has_no_gradient_of_one() -> None:
    run = Run("torch", CPU, torch.float32)
    inputs = run.stable(2, 5, 1, 4, HV=2, state_v_first=False, V=8)
    do, d_state = outer_gradients(run, inputs)
    assert do.shape == inputs["v"].shape and d_state is not None and d_state.shape == (2, 2, 4, 8)
    without = outer_gradients(run, inputs | {"output_final_state": False})
    assert torch.equal(without[0], do) and without[1] is None


def test_the_kernels_of_tilelang_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """One case, since each kernel takes half a minute to compile for a CPU."""
    pytest.importorskip("tilelang")
    monkeypatch.setenv("KDA_EMULATE", "1")
    result = run_case(CASES["GRAD-LAYOUT"], "tilelang", CPU, torch.bfloat16)
    assert result.outcome == "passed", (result.reason, [f.text for f in result.findings if not f.ok])
