"""Cases by circumstance: repetition, order, poisoned memory, strides, padding, and edited cu_seqlens."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from kda.backends.call import PER_TOKEN
from kda.gates.case import Inputs, Run, Skip, case, cut_into_segments, tokens


@case("DETERMINISM", "the same inputs give the same bits")
def determinism(run: Run) -> None:
    inputs = run.stable(1, 1000, 4, initial_state=True)
    o, state = run.chunk_kda(**inputs)
    again_o, again_state = run.chunk_kda(**inputs)
    run.same_bits("o", again_o, o)
    run.same_bits("state", again_state, state)


@case("NANORDER", "no NaN or inf in launches of changing shapes, there and back")
def nan_order(run: Run) -> None:
    launches = [
        run.stable(1, 512, 8), run.stable(1, 128, 2), run.stable(1, 37, 2, lengths=[37]),
        run.stable(1, 584, 2, lengths=[64, 200, 320]), run.stable(1, 384, 2),
        run.stable(1, 1029, 4, lengths=[1029]), run.stable(1, 512, 4, lengths=[100, 128, 284], initial_state=True),
    ]  # fmt: skip
    for i, inputs in enumerate(launches + launches[::-1]):
        o, state = run.chunk_kda(**inputs)
        bad = int((~o.isfinite()).sum() + (~state.isfinite()).sum())
        run.holds(f"launch {i}", bad == 0, f"{bad} values are not finite")


@case("ORDER", "30 rounds among calls of other shapes give the same bits")
def order(run: Run) -> None:
    calls = [
        run.stable(1, 100, 2), run.stable(2, 65, 1, initial_state=True),
        run.stable(1, 130, 2, lengths=[1, 0, 129]), run.raw(1, 64, 2),
    ]  # fmt: skip
    first = [run.chunk_kda(**inputs) for inputs in calls]
    shuffled, differ = random.Random(0), 0
    rounds = run.cut(30, 3)
    for _ in range(rounds):
        for i in shuffled.sample(range(len(calls)), len(calls)):
            o, state = run.chunk_kda(**calls[i])
            differ += not (torch.equal(o, first[i][0]) and torch.equal(state, first[i][1]))
    run.holds("rounds", differ == 0, f"{differ} of {rounds * len(calls)} calls gave other bits (or a NaN)")


@case("PADDING", "tokens before and behind the sequences: o is 0, and they leave no trace")
def padding(run: Run) -> None:
    inputs = run.stable(1, 300, 2, lengths=[70, 90], initial_state=True)
    real = tokens(inputs, 0, 160)
    o, state = run.chunk_kda(**real)
    for poison in (0.0, 1e30, float("nan")):
        shifted = {name: inputs[name].roll(100, 1) for name in PER_TOKEN}
        shifted["cu_seqlens"] = inputs["cu_seqlens"] + 100
        for name in PER_TOKEN:
            shifted[name][:, :100] = shifted[name][:, 260:] = -poison if name == "g" else poison
        shifted_o, shifted_state = run.chunk_kda(**{**inputs, **shifted})
        run.same_bits(f"{poison:g} in front, o", shifted_o[:, 100:260], o)
        run.same_bits(f"{poison:g} in front, state", shifted_state, state)
        run.holds(f"{poison:g} in front, padding", not shifted_o[:, :100].any(), "o is 0 on the padding")
    for poison in (0.0, 1e30, float("nan")):
        padded = {**inputs, **{name: inputs[name].clone() for name in PER_TOKEN}}
        for name in PER_TOKEN:
            padded[name][:, 160:] = -poison if name == "g" else poison
        padded_o, padded_state = run.chunk_kda(**padded)
        run.same_bits(f"{poison:g} o", padded_o[:, :160], o)
        run.same_bits(f"{poison:g} state", padded_state, state)
        run.holds(f"{poison:g} padding", not padded_o[:, 160:].any(), "o is 0 on the padding")
    run.accuracy(real)


@case("BATCH", "a sequence has its bits whatever it is packed with")
def batch(run: Run) -> None:
    for length in (1, 3, 100):
        alone = run.raw(1, length, 2, initial_state=True)
        o, state = run.chunk_kda(**alone)
        for lengths in ([9, length], [length, 1, 0, 200], [64, 1, length, 7]):
            n, start = lengths.index(length), sum(lengths[: lengths.index(length)])
            packed = run.raw(1, sum(lengths), 2, lengths=lengths, initial_state=True, seed=1)
            for name in PER_TOKEN:
                packed[name][:, start : start + length] = alone[name]
            packed["initial_state"][n] = alone["initial_state"][0]
            packed |= {name: alone[name] for name in ("A_log", "dt_bias")}
            packed_o, packed_state = run.chunk_kda(**packed)
            run.same_bits(f"T {length} in {lengths}, o", packed_o[:, start : start + length], o)
            run.same_bits(f"T {length} in {lengths}, state", packed_state[n : n + 1], state)


@case("POISON", "NaN and 1e30 around the tensors and in freed memory")
def poison(run: Run) -> None:
    inputs = run.stable(1, 200, 2, lengths=[37, 0, 163], initial_state=True)
    o, state = run.chunk_kda(**inputs)
    for value in (float("nan"), 1e30):
        embedded = {
            name: _embedded(x, value) if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in inputs.items()
        }
        for like in (o, state, o, state):  # what an allocator may hand out again as the output
            torch.full_like(like, min(value, torch.finfo(like.dtype).max))
        poisoned_o, poisoned_state = run.chunk_kda(**embedded)
        run.same_bits(f"{value:g} o", poisoned_o, o)
        run.same_bits(f"{value:g} state", poisoned_state, state)


def _embedded(x: Tensor, value: float, margin: int = 1 << 14) -> Tensor:
    """x as a contiguous view inside a larger buffer filled with `value`."""
    value = min(value, torch.finfo(x.dtype).max)  # a NaN stays one
    buffer = torch.full((x.numel() + 2 * margin,), value, dtype=x.dtype, device=x.device)
    view = buffer[margin : margin + x.numel()].view(x.shape)
    return view.copy_(x)


@case("STRIDES", "slices of a fused QKV, strided beta, gate and state, odd addresses")
def strides(run: Run) -> None:
    inputs = run.stable(2, 100, 2, initial_state=True)
    o, state = run.chunk_kda(**inputs)
    qkv = torch.cat([inputs["q"], inputs["k"], inputs["v"]], dim=2)
    strided = {
        **inputs,
        "q": qkv[:, :, 0:2], "k": qkv[:, :, 2:4], "v": qkv[:, :, 4:6],
        "g": inputs["g"].transpose(1, 2).contiguous().transpose(1, 2),
        "beta": torch.stack([inputs["beta"], inputs["beta"] * 9], -1)[..., 0],
        "initial_state": inputs["initial_state"].mT.contiguous().mT,
    }  # fmt: skip
    assert not any(strided[name].is_contiguous() for name in (*PER_TOKEN, "initial_state"))
    strided_o, strided_state = run.chunk_kda(**strided)
    run.same_bits("o", strided_o, o)
    run.same_bits("state", strided_state, state)
    run.accuracy(inputs)
    raw = run.raw(1, 70, 2, initial_state=True)
    odd = {name: _embedded(x, 0.0, margin=1) if isinstance(x, Tensor) else x for name, x in raw.items()}
    for what, x, expected in zip(("o", "state"), run.chunk_kda(**odd), run.chunk_kda(**raw), strict=True):
        run.same_bits(f"odd addresses, {what}", x, expected)


@case("ALIAS", "cu_seqlens edited in place between two calls")
def alias(run: Run) -> None:
    inputs = run.stable(1, 200, 2, lengths=[50, 150])
    run.accuracy(inputs, "before")
    inputs["cu_seqlens"][1] = 120
    run.accuracy(inputs, "after")


@case("GRAPH", "a CUDA graph replayed with new values and cu_seqlens")
def graph(run: Run) -> None:
    if run.device.type != "cuda":
        raise Skip("CUDA graphs need a CUDA device")
    if run.backend == "torch":
        raise Skip("the backend torch reads cu_seqlens on the host, which no graph can capture")
    for setting in ("auto", "1"):  # whole sequences at this size, and segments of one chunk
        with cut_into_segments(setting):
            _replay(run, "" if setting == "auto" else "in segments, ")


def _replay(run: Run, label: str) -> None:
    fixed = run.raw(1, 500, 2, lengths=[100, 0, 337], initial_state=True)
    _warm_up(run, fixed)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        o, state = run.chunk_kda(**fixed)
    for seed, lengths in ((1, [1, 400, 99]), (2, [0, 0, 63])):
        fresh = run.raw(1, 500, 2, lengths=lengths, initial_state=True, seed=seed)
        for name, x in fixed.items():
            if isinstance(x, Tensor):
                x.copy_(fresh[name])
        recorded.replay()
        expected_o, expected_state = run.chunk_kda(**fresh)
        run.same_bits(f"{label}{lengths} o", o, expected_o)
        run.same_bits(f"{label}{lengths} state", state, expected_state)
        run.accuracy(fresh, f"{label}{lengths}", stable=False)


def _warm_up(run: Run, inputs: Inputs) -> None:
    """Build and load what the call needs on a side stream, as capture demands."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run.chunk_kda(**inputs)
    torch.cuda.current_stream().wait_stream(side)
