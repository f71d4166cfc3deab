"""The golden's chunked form against the token recurrence, and the recurrence against the paper's."""

from __future__ import annotations

import inspect
import math
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kda
from kda.golden import (
    __main__,
    chunk_kda_golden,
    compare,
    inputs,
    recurrent_kda_golden,
    rel_rmse,
)
from kda.golden.call import Call
from kda.golden.recurrence import RecurrentCall

LIMIT = {torch.float64: 1e-10, torch.float32: 1e-5}
GATES = ["logsigmoid", -1.5, -2.0, -5.0, "half_1000", 0.0, "mixed", -math.inf]
RAGGED = [64, 1, 0, 130, 37, 0, 15]
PER_TOKEN = ("q", "k", "v", "g", "beta")


def check(call: dict[str, Any], dtype: torch.dtype = torch.float64, **options: Any) -> None:
    """The chunked form equals the recurrence within the dtype's limit."""
    actual, expected = chunk_kda_golden(**call, dtype=dtype, **options), recurrent_kda_golden(**call)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == dtype and a.shape == e.shape
        assert rel_rmse(a, e) <= LIMIT[dtype]


def ragged(generator: Any = inputs.raw, **options: Any) -> dict[str, Any]:
    defaults = {"HV": 4, "V": 16, "lengths": RAGGED, "initial_state": True}
    return generator(1, sum(RAGGED), 2, 32, **(defaults | options))


# The recurrence.


def by_hand(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The paper's recurrence in its other orientation, S [V, K], one head at a time, with every flag on."""
    q, k, v, g, beta = (call[name].double() for name in PER_TOKEN)
    (B, T, HV, V), (H, K) = v.shape, q.shape[2:]
    o, state = torch.zeros_like(v), torch.zeros(B, HV, V, K, dtype=torch.float64)
    for b in range(B):
        for h in range(HV):
            S = call["initial_state"][b, h].double()
            for t in range(T):
                x, y = q[b, t, h * H // HV], k[b, t, h * H // HV]
                x, y = x / (x @ x + 1e-6).sqrt() / K**0.5, y / (y @ y + 1e-6).sqrt()
                raw = g[b, t, h] + call["dt_bias"].double().view(HV, K)[h]
                alpha = torch.exp(-call["A_log"][h].double().exp() * torch.log1p(raw.exp()))
                step = 1 / (1 + torch.exp(-beta[b, t, h]))
                S = S * alpha @ (torch.eye(K) - step * torch.outer(y, y)) + step * torch.outer(v[b, t, h], y)
                o[b, t, h] = S @ x
            state[b, h] = S
    return o, state


def test_recurrence_is_the_papers() -> None:
    call = inputs.raw(2, 9, 2, 16, V=8, HV=4, initial_state=True)
    for actual, expected in zip(recurrent_kda_golden(**call), by_hand(call), strict=True):
        assert rel_rmse(actual, expected) < 1e-12


def test_recurrence_continues_from_its_own_state() -> None:
    call = inputs.stable(2, 50, 3, 16)
    o, state = recurrent_kda_golden(**call)
    first, second = ({n: x[:, t] if n in PER_TOKEN else x for n, x in call.items()}
                     for t in (slice(0, 20), slice(20, 50)))  # fmt: skip
    o_1, middle = recurrent_kda_golden(**first)
    o_2, last = recurrent_kda_golden(**second, initial_state=middle)
    assert torch.equal(torch.cat([o_1, o_2], 1), o) and torch.equal(last, state)


# The chunked form against it.


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_every_gate(gate: str | float, dtype: torch.dtype) -> None:
    check(inputs.stable(2, 150, 2, 64, V=32, HV=4, gate=gate, initial_state=True), dtype)


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("generator", [inputs.raw, inputs.collinear])
def test_other_inputs(generator: Any, dtype: torch.dtype) -> None:
    check(generator(1, 200, 2, 64, initial_state=True), dtype)


@pytest.mark.parametrize("chunk_size", [1, 2, 16, 64, 100, 128])
def test_any_chunk_size(chunk_size: int) -> None:
    check(ragged(), chunk_size=chunk_size)


@pytest.mark.parametrize("T", [0, 1, 15, 17, 63, 64, 65, 127, 129])
def test_tails(T: int) -> None:
    check(inputs.raw(1, T, 1, 16, initial_state=True))
    check(inputs.raw(1, T, 1, 16, initial_state=True), torch.float32, chunk_size=128)


@pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 5, 0, 65], [128, 0, 128], [200], []])
@pytest.mark.parametrize("initial_state", [False, True])
def test_lengths(lengths: list[int], initial_state: bool) -> None:
    call = inputs.raw(1, sum(lengths) + 3, 2, 16, lengths=lengths, initial_state=initial_state)
    check(call)
    state = chunk_kda_golden(**call)[1]
    assert state.shape == (len(lengths), 2, 16, 16)
    for n, length in enumerate(lengths):
        if not length:
            assert torch.equal(state[n], call["initial_state"][n].double() if initial_state else 0 * state[n])


def test_varlen_is_each_sequence_alone_and_one_segment_is_fixed_length() -> None:
    call = ragged()
    o, state = chunk_kda_golden(**call)
    start = 0
    for n, length in enumerate(RAGGED):
        alone = __main__._alone(call, n, slice(start, start + length))
        o_n, state_n = chunk_kda_golden(**alone)
        assert torch.equal(o_n, o[:, start : start + length]) and torch.equal(state_n[0], state[n])
        one = alone | {"cu_seqlens": torch.tensor([0, length])}
        assert torch.equal(chunk_kda_golden(**one)[0], o_n)
        start += length


def test_padding_and_unused_memory_leave_no_trace() -> None:
    call = ragged(lengths=RAGGED[:4])
    end = sum(RAGGED[:4])
    clean = chunk_kda_golden(**call)
    for name in PER_TOKEN:
        call[name][:, end:] = math.nan
    for form in (chunk_kda_golden, recurrent_kda_golden):
        o, state = form(**call)
        assert o[:, end:].eq(0).all() and compare(o, clean[0], atol=1e-10, rtol=1e-10).ok
        assert compare(state, clean[1], atol=1e-10, rtol=1e-10).ok


def test_layouts_agree() -> None:
    call = ragged(state_v_first=True)
    kv = call | {"initial_state": call["initial_state"].transpose(-1, -2).contiguous(), "state_v_first": False}
    flat = call | {name: call[name][0] for name in PER_TOKEN}
    for form in (chunk_kda_golden, recurrent_kda_golden):
        o, state = form(**call)
        assert state.shape == call["initial_state"].shape
        o_kv, state_kv = form(**kv)
        assert torch.equal(o, o_kv) and torch.equal(state, state_kv.transpose(-1, -2))
        o_flat, state_flat = form(**flat)
        assert torch.equal(o[0], o_flat) and torch.equal(state, state_flat)


def test_gva_is_repeated_heads_in_consecutive_runs() -> None:
    call = ragged()
    each = call | {name: call[name].repeat_interleave(2, 2) for name in ("q", "k")}
    assert torch.equal(chunk_kda_golden(**call)[0], chunk_kda_golden(**each)[0])


@pytest.mark.parametrize("lower_bound", [None, -5.0, -0.5])
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
@pytest.mark.parametrize("parameters", [True, False])
def test_flags_are_their_formulas(lower_bound: float | None, allow_neg_eigval: bool, parameters: bool) -> None:
    if lower_bound is None and not parameters:
        pytest.skip("the softplus gate needs A_log")
    options = {"lower_bound": lower_bound, "allow_neg_eigval": allow_neg_eigval}
    call = inputs.raw(1, 70, 2, 16, HV=4, dtype=torch.float64, **options)
    if not parameters:
        call |= {"A_log": None, "dt_bias": None}
    check(call)

    x, rate = call["g"], 1.0
    if parameters:
        x, rate = x + call["dt_bias"].double().view(4, 16), call["A_log"].double().exp().view(4, 1)
    plain = {name: call[name] for name in ("v", "output_final_state")}
    plain |= {name: call[name] / (call[name].square().sum(-1, keepdim=True) + 1e-6).sqrt() for name in ("q", "k")}
    plain["g"] = -rate * torch.log1p(x.exp()) if lower_bound is None else lower_bound / (1 + torch.exp(-rate * x))
    plain["beta"] = (2 if allow_neg_eigval else 1) / (1 + torch.exp(-call["beta"]))
    for form in (chunk_kda_golden, recurrent_kda_golden):
        for actual, expected in zip(form(**call), form(**plain, scale=0.25), strict=True):
            assert rel_rmse(actual, expected) <= 1e-10


def test_scale() -> None:
    call = inputs.stable(1, 70, 2, 16)
    for form in (chunk_kda_golden, recurrent_kda_golden):
        assert torch.equal(form(**call)[0], form(**call, scale=0.25)[0])
        assert torch.allclose(form(**call, scale=1.0)[0], 4 * form(**call)[0])


def test_raw_gate_without_its_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match="A_log: expected with use_gate_in_kernel"):
        chunk_kda_golden(**inputs.raw(1, 5, 1, 16) | {"A_log": None})


def test_bound_changes_nothing() -> None:
    call = inputs.stable(1, 150, 2, 32, gate="half_1000", dtype=torch.float32)
    outcomes = [
        chunk_kda_golden(**call | {"g": call["g"].masked_fill(call["g"] == -1000, strong)}, dtype=torch.float32)
        for strong in (-1000.0, -104.0, -math.inf, -3e38)
    ]
    for o, state in outcomes[1:]:
        assert torch.equal(o, outcomes[0][0]) and torch.equal(state, outcomes[0][1])


@pytest.mark.parametrize("strong", [-1000.0, -math.inf])
def test_strong_gate_forgets_all_that_was(strong: float) -> None:
    call = inputs.stable(1, 60, 2, 16, initial_state=True)
    call["g"][:, 30] = strong
    rest = {name: x[:, 30:] if name in PER_TOKEN else x for name, x in call.items() if name != "initial_state"}
    for form in (chunk_kda_golden, recurrent_kda_golden):
        (o, state), (o_rest, state_rest) = form(**call), form(**rest)
        assert rel_rmse(o[:, 30:], o_rest) <= 1e-12 and rel_rmse(state, state_rest) <= 1e-12


def test_noncontiguous_inputs_and_gradients_leave_arguments_alone() -> None:
    call = ragged(HV=2, V=32)
    fused = torch.cat([call["q"], call["k"], call["v"]], -1).requires_grad_()
    strided = call | dict(zip(("q", "k", "v"), fused.split(32, -1), strict=True))
    strided["initial_state"] = call["initial_state"].transpose(0, 1).contiguous().transpose(0, 1)
    before = {name: x.clone() for name, x in strided.items() if isinstance(x, Tensor)}
    for form in (chunk_kda_golden, recurrent_kda_golden):
        o, state = form(**strided)
        assert not o.requires_grad
        assert torch.equal(o, form(**call)[0]) and torch.equal(state, form(**call)[1])
    assert all(torch.equal(strided[name], x) for name, x in before.items())


def test_same_bits_for_any_number_of_threads_which_stays_as_it_was() -> None:
    threads = torch.get_num_threads()
    call = ragged(HV=8)
    o, state = chunk_kda_golden(**call)
    try:
        for other in (1, 2, 3):
            torch.set_num_threads(other)
            again = chunk_kda_golden(**call)
            with ThreadPoolExecutor(1) as later:
                assert torch.get_num_threads() == later.submit(torch.get_num_threads).result() == other
            assert torch.equal(o, again[0]) and torch.equal(state, again[1])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("form", "golden"), [("chunk_kda", Call), ("fused_recurrent_kda", RecurrentCall)])
def test_arguments_are_the_operators(form: str, golden: type) -> None:
    ours = inspect.signature(golden).parameters.values()
    theirs = inspect.signature(getattr(kda, form)).parameters.values()
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs if p.name != "backend"]


def test_contradicting_shapes_are_refused() -> None:
    call = inputs.stable(2, 5, 2, 16)
    with pytest.raises(ValueError, match="batch 1 with cu_seqlens, got 2"):
        chunk_kda_golden(**call, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"multiple of q's 2, got 3"):
        chunk_kda_golden(**inputs.stable(1, 5, 2, 16, HV=3))
    with pytest.raises(ValueError, match=r"\[B, T, H, K\] without cu_seqlens"):
        chunk_kda_golden(**call | {"q": call["q"][0]})
    with pytest.raises(TypeError, match="head_first"):
        chunk_kda_golden(**call, head_first=True)


# Memory.

PEAK = """
import re, torch
from kda.golden import chunk_kda_golden, inputs
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
chunk_kda_golden(**inputs.stable(1, 64, 8, 64), dtype=torch.float64)
call = inputs.stable(1, {T}, 8, 64)
before = peak()
o, _ = chunk_kda_golden(**call, dtype=torch.float64)
print(peak() - before - o.numel() * o.element_size() / 2**20)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_memory_beyond_the_output_does_not_grow_with_length() -> None:
    """The decays of all chunks at once would be 1 GiB, the stages' tensors 0.25 GiB."""
    done = subprocess.run([sys.executable, "-c", PEAK.format(T=4096)], capture_output=True, text=True, check=True)
    assert float(re.search(r"\S+$", done.stdout.strip())[0]) < 150
