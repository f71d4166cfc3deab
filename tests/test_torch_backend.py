"""The torch backend's chunk_kda against the fp64 token recurrence, its own stages, and its promises as a function."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kda
from kda import golden
from kda.backends import torch as backend
from kda.backends.torch import chunk
from kda.golden import inputs, rel_rmse
from kda.normalise import normalise

FP32_LIMIT = 1e-5
LENGTHS = [0, 5, 64, 130, 0, 1, 63, 65, 16]
GATES = ["logsigmoid", -1.5, -2.0, -5.0, 0.0, -1e-3, -1000.0, -torch.inf, "half_1000", "mixed"]


pytestmark = pytest.mark.usefixtures("one_thread")


def run(call: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    return kda.chunk_kda(**call, backend="torch")


def assert_matches_recurrence(call: dict[str, Any], limit: float = FP32_LIMIT) -> None:
    o, state = run(call)
    o_ref, state_ref = golden.recurrent_kda_golden(**call)
    assert o.dtype == call["v"].dtype and o.shape == call["v"].shape
    assert state.dtype == (torch.float64 if o.dtype == torch.float64 else torch.float32)
    assert rel_rmse(o, o_ref) <= limit and rel_rmse(state, state_ref) <= limit


def assert_same_bits(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


# What it computes


@pytest.mark.parametrize("gate", GATES)
def test_is_exact_at_every_gate(gate: str | float) -> None:
    assert_matches_recurrence(inputs.stable(2, 200, 2, 64, 32, gate=gate, dtype=torch.float32, initial_state=True))


@pytest.mark.parametrize("T", [1, 2, 15, 17, 63, 64, 65, 127, 129, 500])
def test_tails(T: int) -> None:
    assert_matches_recurrence(inputs.stable(1, T, 1, 32, dtype=torch.float32, initial_state=True))


@pytest.mark.parametrize("state_v_first", [True, False])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_flags_gva_and_state_layouts(lower_bound: float | None, state_v_first: bool) -> None:
    call = inputs.raw(
        1, 400, 2, 32, 48, 6, lengths=LENGTHS, lower_bound=lower_bound, allow_neg_eigval=lower_bound is not None,
        initial_state=True, dtype=torch.float32, state_v_first=state_v_first,
    )  # fmt: skip
    assert_matches_recurrence(call)


@pytest.mark.parametrize("K, V", [(1, 1), (3, 5), (256, 64)])
def test_takes_any_head_size(K: int, V: int) -> None:
    assert_matches_recurrence(inputs.stable(1, 70, 2, K, V, dtype=torch.float32, initial_state=True))


@pytest.mark.parametrize(
    "dtype, limit", [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float16, 5e-4)]
)
def test_dtypes(dtype: torch.dtype, limit: float) -> None:
    call = inputs.stable(1, 200, 2, 64, dtype=dtype)
    assert_matches_recurrence(call, limit)
    assert_matches_recurrence(call | {"g": call["g"].to(dtype), "beta": call["beta"].to(dtype)}, limit)


def test_scale() -> None:
    call = inputs.stable(1, 100, 1, 32, dtype=torch.float32)
    assert_matches_recurrence(call | {"scale": 0.5})


def test_more_heads_than_are_worked_on_at_a_time() -> None:
    assert_matches_recurrence(inputs.stable(1, 70, 45, 8, HV=90, dtype=torch.float32, initial_state=True))


def test_nearly_equal_keys_without_decay() -> None:
    assert_matches_recurrence(inputs.collinear(1, 600, 2, 64, dtype=torch.float32))


def test_cancellation_in_the_corrected_values() -> None:
    assert_matches_recurrence(inputs.cancellation_stress(1, 128, 1, 32, dtype=torch.float32))


def test_saturated_beta_with_negative_eigenvalues() -> None:
    call = inputs.raw(1, 200, 1, 32, dtype=torch.float32, allow_neg_eigval=True)
    assert_matches_recurrence(call | {"beta": call["beta"] + 20.0})


# Layouts


@pytest.mark.parametrize("lengths", [LENGTHS, [0, 0, 0], [128, 0, 128], [1] * 40, [300, 1, 1, 1]])
def test_packed_sequences(lengths: list[int]) -> None:
    call = inputs.stable(1, sum(lengths) + 9, 2, 32, 16, lengths=lengths, dtype=torch.float32, initial_state=True)
    assert_matches_recurrence(call)
    o, state = run(call)
    assert not o[:, sum(lengths) :].any()
    empty = [n for n, length in enumerate(lengths) if length == 0]
    assert torch.equal(state[empty], call["initial_state"][empty])


def test_unpacked_rank_three_input() -> None:
    call = inputs.stable(1, 400, 2, 32, lengths=LENGTHS, dtype=torch.float32)
    flat = call | {name: call[name][0] for name in ("q", "k", "v", "g", "beta")}
    assert_same_bits(run(flat), (run(call)[0][0], run(call)[1]))


@pytest.mark.parametrize("T", [37, 64, 4117])
def test_one_packed_sequence_is_bit_identical_to_fixed_length(T: int) -> None:
    call = inputs.stable(1, T, 2, 32, dtype=torch.float32, initial_state=True)
    assert_same_bits(run(call), run(call | {"cu_seqlens": torch.tensor([0, T])}))


@pytest.mark.parametrize("B, T", [(1, 0), (3, 0), (0, 5)])
def test_no_tokens(B: int, T: int) -> None:
    call = inputs.stable(B, T, 2, 8, 4, initial_state=True)
    o, state = run(call)
    assert o.shape == (B, T, 2, 4) and torch.equal(state, call["initial_state"])


def test_more_sequences_than_fit_a_launch_grid() -> None:
    N = 70_000
    call = inputs.stable(1, N, 1, 4, 2, lengths=[1] * N, dtype=torch.float32)
    o, _ = run(call)
    q, k, v, beta = (call[name].double() for name in ("q", "k", "v", "beta"))
    assert rel_rmse(o, (q * k).sum(-1, keepdim=True) * 4**-0.5 * beta.unsqueeze(-1) * v) <= FP32_LIMIT


def test_carried_state_continues_a_sequence() -> None:
    call = inputs.stable(1, 300, 2, 32, dtype=torch.float32)
    whole, last = run(call)
    parts, state = [], None
    for at in range(0, 300, 100):
        part = {name: call[name][:, at : at + 100] for name in ("q", "k", "v", "g", "beta")}
        o, state = run(call | part | {"initial_state": state})
        parts.append(o)
    assert rel_rmse(torch.cat(parts, 1), whole) <= 1e-6 and rel_rmse(state, last) <= 1e-6


def test_later_tokens_do_not_matter() -> None:
    call = inputs.stable(1, 300, 2, 32, dtype=torch.float32)
    o, _ = run(call)
    call["v"][:, 150:] = 1e4
    call["g"][:, 150:] = -1000.0
    assert rel_rmse(run(call)[0][:, :150], o[:, :150]) <= 1e-6


def test_edited_cu_seqlens_count() -> None:
    call = inputs.stable(1, 100, 1, 16, lengths=[40, 60], dtype=torch.float32)
    run(call)
    call["cu_seqlens"][1] = 70
    assert_matches_recurrence(call)


@pytest.mark.parametrize(
    "bounds, message",
    [
        ([1, 5], "0 first, got 1"),
        ([0, 5, 3], "no decrease, got 5 and then 3 at index 2"),
        ([0, 9], "at most T = 8 last, got 9"),
    ],
)
def test_wrong_cu_seqlens_are_named(bounds: list[int], message: str) -> None:
    call = inputs.stable(1, 8, 1, 4)
    with pytest.raises(ValueError, match=f"cu_seqlens: expected {message}"):
        run(call | {"cu_seqlens": torch.tensor(bounds)})


def test_autocast_does_not_reach_in() -> None:
    call = inputs.stable(1, 100, 2, 16, dtype=torch.float32)
    call |= leaves(call, torch.float32)
    expected = run(call)
    with torch.autocast("cpu", torch.bfloat16):
        results = run(call)
    assert_same_bits(results, expected)
    (grad,) = torch.autograd.grad(results[0].sum(), call["q"])
    assert torch.equal(grad, torch.autograd.grad(expected[0].sum(), call["q"])[0])


# Memory that is not its own


def test_strided_inputs() -> None:
    call = inputs.raw(2, 100, 2, 16, 16, dtype=torch.float32, initial_state=True)
    fused = torch.cat([call["q"], call["k"], call["v"]], 2)
    strided = dict(zip("qkv", fused.split(2, 2), strict=True))
    strided["g"] = call["g"].transpose(1, 2).contiguous().transpose(1, 2)
    strided["beta"] = torch.stack([call["beta"], call["beta"]], -1)[..., 0]
    strided["initial_state"] = call["initial_state"].mT.contiguous().mT
    assert not any(x.is_contiguous() for x in strided.values())
    assert_same_bits(run(call | strided), run(call))


def test_inputs_are_left_alone_and_runs_repeat() -> None:
    call = inputs.raw(1, 400, 2, 32, lengths=LENGTHS, initial_state=True)
    before = {name: x.clone() for name, x in call.items() if isinstance(x, Tensor)}
    first = run(call)
    run(inputs.stable(2, 70, 3, 16))
    assert_same_bits(run(call), first)
    for name, x in before.items():
        assert torch.equal(call[name], x), name


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30])
def test_padding_leaves_no_trace(poison: float) -> None:
    call = inputs.raw(1, 100, 2, 16, lengths=[30, 0, 53], dtype=torch.float32, initial_state=True)
    clean = run(call)
    for name in ("q", "k", "v", "g", "beta"):
        call[name][:, 83:] = poison
        call[name].requires_grad_()
    o, state = run(call)
    assert_same_bits((o, state), clean)
    (o.sum() + state.sum()).backward()
    for name in ("q", "k", "v", "g", "beta"):
        assert call[name].grad.isfinite().all() and not call[name].grad[:, 83:].any(), name


# Stages


@pytest.mark.parametrize("gate", ["logsigmoid", "half_1000"])
def test_stages_are_the_goldens(gate: str) -> None:
    call = inputs.stable(1, 400, 2, 32, 16, 4, lengths=LENGTHS, gate=gate, dtype=torch.float32, initial_state=True)
    stages = backend.stages(normalise("chunk_kda", **call))
    expected = golden.chunk_kda_stages(**call)
    assert set(stages) == {name for names in golden.STAGES.values() for name in names} == set(expected)
    for name, x in stages.items():
        assert x.shape == expected[name].shape and rel_rmse(x, expected[name]) <= FP32_LIMIT, name


# Gradients


def leaves(call: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies of the call's floating-point tensors that require grad."""
    return {
        name: x.to(dtype).detach().clone().requires_grad_()
        for name, x in call.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }


SMALL: list[dict[str, Any]] = [
    inputs.stable(1, 9, 1, 2, 1, 2, lengths=[0, 5, 1, 2], dtype=torch.float64, initial_state=True),
    inputs.raw(1, 8, 1, 2, 1, 2, lengths=[3, 5], dtype=torch.float64, initial_state=True, state_v_first=False),
    inputs.raw(2, 5, 1, 2, 1, lower_bound=-5.0, allow_neg_eigval=True, dtype=torch.float64, initial_state=True),
]


@pytest.mark.parametrize("call", SMALL, ids=["varlen", "gate", "bounded"])
def test_gradcheck(call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "CHUNK_SIZE", 4)
    x = leaves(call, torch.float64)
    assert torch.autograd.gradcheck(lambda *tensors: run(call | dict(zip(x, tensors, strict=True))), tuple(x.values()))


def gradients(call: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradients of a fixed random functional of o and the final state."""
    x = leaves(call, dtype)
    generator = torch.Generator().manual_seed(7)
    results = run(call | x)
    sum((r * torch.randn(r.shape, generator=generator).to(dtype)).sum() for r in results).backward()
    return {name: tensor.grad for name, tensor in x.items()}


def saturated(A_log: float) -> dict[str, Any]:
    call = inputs.raw(1, 130, 2, 16, dtype=torch.float32, initial_state=True)
    return call | {"A_log": torch.full((2,), A_log)}


@pytest.mark.parametrize(
    "call",
    [inputs.stable(1, 130, 2, 16, gate=gate, dtype=torch.float32, initial_state=True) for gate in GATES]
    + [saturated(10.0), saturated(60.0), saturated(1000.0)]
    + [inputs.raw(1, 130, 2, 16, lower_bound=-5.0, dtype=torch.float32) | {"A_log": torch.full((2,), 1000.0)}],
    ids=[*map(str, GATES), "A_log 10", "A_log 60", "A_log 1000", "bounded, A_log 1000"],
)
def test_gradients_are_right_at_every_gate(call: dict[str, Any]) -> None:
    expected = gradients(call, torch.float64)
    for name, actual in gradients(call, torch.float32).items():
        assert actual.isfinite().all(), name
        error = (actual - expected[name]).norm()
        assert error <= 1e-5 * expected[name].norm() + 1e-12, name


# Cost


class Work(TorchDispatchMode):
    """Counts the elements that all operators put out, views apart."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.elements += sum(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))
        return out


@pytest.mark.parametrize("backward", [False, True])
def test_work_is_linear_in_T(backward: bool) -> None:
    def work(T: int) -> int:
        call = inputs.stable(1, T, 4, 16)
        if backward:
            call |= leaves(call, torch.float32)
        with Work() as counted:
            o, _ = run(call)
            if backward:
                o.sum().backward()
        return counted.elements

    assert work(16384) <= 2.02 * work(8192)


MEMORY = """
import sys
from pathlib import Path
import torch, kda
from kda.golden import inputs
torch.set_num_threads(1)
backward = sys.argv[1] == "backward"

def peak(T):
    call = inputs.stable(1, T, 2, 64, dtype=torch.float32)
    for name in ("q", "k", "v", "g", "beta"):
        call[name].requires_grad_(backward)
    o, _ = kda.chunk_kda(**call, backend="torch")
    if backward:
        o.sum().backward()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].removesuffix("kB"))

print(peak(64), peak(8192), peak(32768))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_peak_memory_is_linear_in_T(mode: str) -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY, mode], capture_output=True, text=True, check=True)
    base, once, four_times = map(int, done.stdout.split())
    assert four_times - base <= 4.4 * (once - base)
