"""The TileLang kernels on the device: the gates, the launch path, and flash-linear-attention's answers beside ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_calls import CALLS, check

import kda
from kda.backends.tilelang import build, chunk, tables
from kda.checks import checked
from kda.gates.case import run_case
from kda.gates.command import CASES as GATES
from kda.golden import inputs, recurrent_kda_golden, rel_rmse

FAST = [id for id, case in GATES.items() if not case.slow]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("id", FAST)
def test_gate(id: str, dtype: torch.dtype) -> None:
    result = run_case(GATES[id], "tilelang", torch.device("cuda", 0), dtype)
    assert result.outcome == "passed", (result.reason, [f.text for f in result.findings if not f.ok])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", CALLS)
def test_decode(name: str, dtype: torch.dtype) -> None:
    if name == "rows whose squares are beyond fp32" and dtype == torch.float16:
        pytest.skip("fp16 ends at 65504")
    check(name, "tilelang", 5e-3, "cuda", dtype)


def test_30_runs_give_one_set_of_bits() -> None:
    call = inputs.raw(1, 1000, 4, lengths=[100, 0, 900], initial_state=True, device="cuda")
    o, state = kda.chunk_kda(**call, backend="tilelang")
    for _ in range(30):
        again_o, again_state = kda.chunk_kda(**call, backend="tilelang")
        assert torch.equal(again_o, o) and torch.equal(again_state, state)


@pytest.mark.parametrize("lengths", [None, [9000, 0, 100, 7284]], ids=["fixed", "packed"])
def test_cut_calls_agree_with_whole_ones_and_have_one_set_of_bits(
    lengths: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are cut on this GPU where KDA_SPLIT says nothing."""
    call = inputs.raw(1, 16384, 4, lengths=lengths, initial_state=True, device="cuda")
    monkeypatch.delenv("KDA_SPLIT", raising=False)
    o, state = kda.chunk_kda(**call, backend="tilelang")
    for _ in range(30):
        again_o, again_state = kda.chunk_kda(**call, backend="tilelang")
        assert torch.equal(again_o, o) and torch.equal(again_state, state)
    monkeypatch.setenv("KDA_SPLIT", "off")
    whole_o, whole_state = kda.chunk_kda(**call, backend="tilelang")
    assert not torch.equal(whole_o, o), "it was not cut"
    assert rel_rmse(o, whole_o) <= 5e-3 and rel_rmse(state, whole_state) <= 5e-3


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


@pytest.mark.parametrize("gate", ["logsigmoid", "mixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_twins_of_prepare_agree(gate: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread-level kernel, which no CPU can execute, against the tile-level one, which the CPU tests hold."""
    call = inputs.stable(1, 1000, 2, HV=4, gate=gate, lengths=[100, 0, 867], dtype=dtype, device="cuda")
    found = []
    for twin in (tables.PREPARE[build.CPU], tables.PREPARE[build.HOPPER]):
        monkeypatch.setitem(tables.PREPARE, build.HOPPER, twin)
        found.append(chunk.stages(replace(checked("chunk_kda", **call), memo={})))
    assert "Ainv" in found[0], "which is for the backward pass"
    for name, tile_level in found[0].items():
        assert rel_rmse(found[1][name], tile_level) <= 5e-3, name


@pytest.mark.parametrize("V", [64, 128])
def test_chunk_o_makes_the_recurrences_output_of_the_snapshots(V: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = inputs.stable(2, 500, 2, V=V, initial_state=True, device="cuda")
    o, _ = kda.chunk_kda(**call, backend="tilelang")
    read: list[torch.Tensor] = []

    def noting(target: str, builder: str, **parameters: Any) -> Callable[..., None]:
        kernel = build.build(target, builder, **parameters)
        return lambda *arguments: (read.append(arguments[0]), kernel(*arguments))

    monkeypatch.setattr(tables, "build", noting)
    stages = chunk.stages(replace(checked("chunk_kda", **call), memo={}))
    table = read[-1]  # what chunk_delta_h, the last kernel, read
    builder = "kda.backends.tilelang.kernels.chunk_o.chunk_o"
    chunk_o = build.build(build.HOPPER, builder, HV=2, K=128, V=V, dtype="bfloat16", block_V=V)
    pair_o = torch.full_like(o, float("nan"))
    chunk_o(table, stages["h"].mT.contiguous(), stages["v_new"], 500, pair_o)
    assert rel_rmse(pair_o, o) <= 5e-3


def test_one_build_serves_every_length() -> None:
    kda.chunk_kda(**inputs.stable(1, 1, 2, device="cuda"), backend="tilelang")
    built = build.kernel.cache_info().misses
    for T in range(1, 201):
        kda.chunk_kda(**inputs.stable(1, T, 2, device="cuda"), backend="tilelang")
    assert build.kernel.cache_info().misses == built


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_runs_on_the_tensors_device_and_leaves_the_current_one(operator: Callable[..., Any]) -> None:
    call = inputs.raw(1, 300, 2, lengths=[100, 200], initial_state=True, device="cuda:0")
    there = {name: x.to("cuda:1") if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    o, state = operator(**call, backend="tilelang")
    o_there, state_there = operator(**there, backend="tilelang")
    assert torch.cuda.current_device() == 0 and o_there.device == torch.device("cuda:1")
    assert torch.equal(o_there.cpu(), o.cpu()) and torch.equal(state_there.cpu(), state.cpu())


@pytest.mark.parametrize("state_v_first", [True, False])
@pytest.mark.parametrize("safe_gate", [True, False])
def test_agrees_with_fla_and_is_no_worse(safe_gate: bool, state_v_first: bool) -> None:
    fla = pytest.importorskip("fla.ops.kda")
    options: dict[str, Any] = {"state_v_first": state_v_first, "initial_state": True}
    call = inputs.raw(1, 1024, 2, lower_bound=-5.0, device="cuda", **options)
    o, state = kda.chunk_kda(**call, backend="tilelang")
    fla_o, fla_state = fla.chunk_kda(**call, safe_gate=safe_gate)
    true_o, true_state = recurrent_kda_golden(**call)
    for ours, theirs, true in ((o, fla_o, true_o), (state, fla_state, true_state)):
        error, fla_error = rel_rmse(ours, true), rel_rmse(theirs, true)
        assert error <= fla_error
        # Two right answers that round independently differ by the root of the sum of their squared errors.
        assert rel_rmse(ours, theirs) <= math.hypot(error, fla_error)


TIE = 1.05
"""Where both round the same tensors, two kernels' errors differ by chance."""


@pytest.mark.parametrize("T", [64, 256, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_near_identical_keys_are_no_worse_than_flas(dtype: torch.dtype, T: int) -> None:
    """A family of keys that share a direction; FLA's error is that of the better of its two forms."""
    fla = pytest.importorskip("fla.ops.kda")
    family = {
        f"cosine {cosine}, beta {beta}{', free queries' if free else ''}": inputs.alike(
            1, T, 2, dtype=dtype, device="cuda", cosine=cosine, beta=beta, shared_queries=not free, positive=not free
        )
        for cosine in (0.9, 0.99, 0.999) for beta in (0.9, 0.99, 1.0) for free in (False, True)
    }  # fmt: skip
    family["collinear"] = inputs.collinear(1, T, 2, dtype=dtype, device="cuda")
    worse = []
    for label, call in family.items():
        true = recurrent_kda_golden(**call)
        ours = kda.chunk_kda(**call, backend="tilelang")
        theirs = [fla.chunk_kda(**call, safe_gate=safe) for safe in (False, True)]
        for i, what in enumerate(("o", "state")):
            error, best = rel_rmse(ours[i], true[i]), min(rel_rmse(x[i], true[i]) for x in theirs)
            print(f"T {T} {dtype} {label}, {what}: {error:.2e}, FLA {best:.2e}, ratio {error / best:.2f}")
            worse += [f"{label}, {what}: {error:.2e} > {best:.2e}"] if error > TIE * best else []
    assert not worse, worse
