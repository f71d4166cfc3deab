"""Sequences cut into segments: each kernel on the golden's tensors, executed on the CPU in float32; whole calls; where
the rule cuts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kda
from kda.golden import chunk_kda_golden, chunk_kda_stages, inputs
from kda.golden.constants import CHUNK_SIZE

pytest.importorskip("tilelang")

from kda.backends.tilelang import build, segments, split
from kda.backends.tilelang.chunk_table import UNUSED, columns, num_entries
from kda.checks import checked

KERNELS = "kda.backends.tilelang.kernels"
TOLERANCE = 3e-6
"""Of the largest element of a tensor: a few roundings in float32, a hundred times below what a wrong formula costs."""

GATES = ["logsigmoid", -1.5, -5.0, 0.0, float("-inf"), "half_1000", "mixed"]
PACKED = [[0, 5, 0, 65], [0, 0, 0], [128, 0, 128], [1] * 20, [200], [300, 1, 129, 64, 63, 257], [13, 500, 2]]


@pytest.fixture(autouse=True)
def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_EMULATE", "1")


def kernel(builder: str, **parameters: Any) -> build.Kernel:
    return build.build(build.CPU, f"{KERNELS}.{builder}", **parameters)


def poison(*shape: int) -> Tensor:
    """An output as it may come from the allocator."""
    return torch.full(shape, float("nan"))


def close(name: str, x: Tensor, y: Tensor) -> None:
    if y.numel():
        error, largest = (x.double() - y).abs().max(), y.abs().max()
        assert error <= TOLERANCE * (largest + 1e-3), f"{name}: off by {error:.2e}, largest {largest:.2e}"


def plan(lengths: list[int], size: int, followed: int, *, HV: int = 8, processors: int = 132) -> tuple[Tensor, Tensor]:
    """plan_segments' two tables."""
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    N = len(lengths)
    table = torch.full((followed + N, 3), 99, dtype=torch.int32)
    runs = torch.full((N, 3), 99, dtype=torch.int32)
    planned = kernel("plan_segments.plan_segments", HV=HV, tiles=2, processors=processors, cu_dtype=cu_seqlens.dtype)
    planned(cu_seqlens, size, table, runs)
    return table, runs


def longest_piece(lengths: list[int], **machine: int) -> int:
    """Chunks of the longest segment where the kernel chooses."""
    table, _ = plan(lengths, 0, 66, **machine)
    return int(table[:, 2].max())


# ---- where sequences are cut


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("lengths", [*PACKED, [70] * 300], ids=lambda x: f"{len(x)}x{x[0]}")
def test_the_plan_cuts_every_sequence_and_ranks_the_segments(lengths: list[int], size: int) -> None:
    chunks = [-(-length // CHUNK_SIZE) for length in lengths]
    most = num_entries(sum(lengths), len(lengths), varlen=True) // size
    table, runs = plan(lengths, size, most)
    followed = sum(max(-(-c // size), 1) - 1 for c in chunks)
    assert followed <= most
    last = table[followed : followed + len(lengths)]
    assert (table[followed + len(lengths) :] == torch.tensor([UNUSED, 0, 0])).all()
    assert last[:, 2].tolist() == sorted(last[:, 2].tolist(), reverse=True) and len(last[:, 0].unique()) == len(lengths)
    for n, c in enumerate(chunks):
        first, count, end = runs[n].tolist()
        ranks = [*range(first, first + count), end]
        assert max(ranks[:-1], default=-1) < followed <= end
        assert table[ranks, 0].tolist() == [n] * (count + 1)
        assert table[ranks, 1].tolist() == [size * i for i in range(count + 1)]
        assert table[ranks, 2].tolist() == [size] * count + [c - size * count]


def test_the_device_cuts_what_pays() -> None:
    assert longest_piece([8192] * 8) == 128  # whole: every multiprocessor is at work already
    assert longest_piece([1000, 1000]) == 16  # whole: too short
    assert longest_piece([60000, 300, 300, 300, 300]) <= 130
    assert longest_piece([40000, 10000, 9000, 6536]) <= 170
    assert longest_piece([65536], processors=1) == 1024


def test_whatever_the_device_chooses_has_a_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        N = int(torch.randint(1, 12, (), generator=generator))
        lengths = (torch.rand(N, generator=generator).pow(4) * 100_000).long().tolist()
        table, runs = plan(lengths, 0, 132 // 16)
        for n, length in enumerate(lengths):
            first, count, last = runs[n].tolist()
            own = table[[*range(first, first + count), last]]
            assert (own[:, 0] == n).all() and own[:, 2].sum() == -(-length // CHUNK_SIZE)
            assert own[:, 1].tolist() == [0, *own[:-1, 2].cumsum(0).tolist()]


@pytest.mark.parametrize("T", [8192, 16384, 32768, 65536, 131072])
@pytest.mark.parametrize("HV", [1, 4, 8, 16, 28, 33])
def test_one_packed_sequence_is_cut_like_one_of_fixed_length(HV: int, T: int) -> None:
    chunks = T // CHUNK_SIZE
    expected = min(segments.best_size(chunks, 2 * HV, 132), chunks)
    assert longest_piece([T], HV=HV) == expected
    assert longest_piece([0, T, 0], HV=HV) == expected


def test_the_rule() -> None:
    assert segments.best_size(1024, 16, 132) in range(120, 150)
    assert all(segments.best_size(chunks, 66, 132) == segments.WHOLE for chunks in (1, 128, 4096))
    assert segments.best_size(8, 16, 132) == segments.WHOLE  # too short
    assert all(segments.best_size(chunks, 2, 132) >= 1 for chunks in range(300))
    assert segments.best_size(4096, 2, 1) == segments.WHOLE  # the CPU


@pytest.mark.parametrize(
    ("H", "B", "T", "lengths", "is_cut"),
    [(8, 1, 65536, None, True), (4, 1, 65536, None, True), (16, 1, 8192, None, True), (8, 2, 8192, None, True),
     (32, 1, 32768, None, False), (96, 1, 8192, None, False), (64, 1, 8192, [1024] * 8, False),
     (8, 8, 8192, None, False), (8, 1, 65536, [40000, 10000, 9000, 6536], True), (8, 1, 4096, [4000, 96], False),
     (8, 1, 65536, [8192] * 8, True)],
)  # fmt: skip
def test_which_calls_are_cut(
    H: int, B: int, T: int, lengths: list[int] | None, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "processors", lambda device: 132)
    monkeypatch.setattr("kda.backends.tilelang.tables.processors", lambda device: 132)
    call = checked("chunk_kda", **meta_call(B, T, H, lengths))
    with build.collecting():
        assert (split.make_split(call, with_ainv=False) is not None) is is_cut
        monkeypatch.setenv("KDA_SPLIT", "off")
        assert split.make_split(call, with_ainv=False) is None
        monkeypatch.setenv("KDA_SPLIT", "7")
        assert split.make_split(call, with_ainv=False) is not None


def meta_call(B: int, T: int, H: int, lengths: list[int] | None) -> dict[str, Any]:
    """A call whose tensors have no memory to speak of."""

    def stretched(*shape: int) -> Tensor:
        return torch.zeros((), dtype=torch.bfloat16).expand(shape)

    call = {name: stretched(B, T, H, 128) for name in ("q", "k", "v", "g")} | {"beta": stretched(B, T, H)}
    if lengths:
        call["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(lengths)])
    return call


# ---- stage by stage


def stage_by_stage(call: dict[str, Any], size: int) -> None:
    """summary and scan from the golden's tables, and the carry from the golden's states."""
    q, v, cu_seqlens, initial = call["q"], call["v"], call.get("cu_seqlens"), call.get("initial_state")
    packed = cu_seqlens is not None
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    N = len(cu_seqlens) - 1 if packed else B
    bounds = cu_seqlens.tolist() if packed else [T * b for b in range(B + 1)]
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    chunks = [-(-length // CHUNK_SIZE) for length in lengths]
    stages, (o_expected, final_expected) = chunk_kda_stages(**call), chunk_kda_golden(**call)

    # The golden's tensors, in the entries that they have.
    bases = [bounds[n] // CHUNK_SIZE + n if packed else n * chunks[0] for n in range(N)]
    used = [base + i for base, c in zip(bases, chunks, strict=True) for i in range(c)]
    entries = num_entries(B * T, N, packed)
    table, decay = poison(entries, HV, CHUNK_SIZE, columns(K, V, with_ainv=False).width), poison(entries, HV, K)
    table[used] = torch.cat([stages[name] for name in ("qg", "kg", "w", "u", "Aqk")], -1).float()
    decay[used] = stages["decay"].float()
    starts = dict(zip(used, stages["h"].mT, strict=True))

    pieces = max(-(-max(chunks) // size), 1)
    if packed:
        cut, runs = plan(lengths, size, entries // size)
        walks: tuple[Any, ...] = (cu_seqlens, cut)
        followed = entries // size
    else:
        runs, walks, followed = pieces, (T, size), N * (pieces - 1)
        rows = [[n, p * size, size] for n in range(N) for p in range(pieces - 1)]
        rows += [[n, (pieces - 1) * size, chunks[n] - (pieces - 1) * size] for n in range(N)]
        cut = torch.tensor(rows, dtype=torch.int32)
    common = {"HV": HV, "K": K, "V": V, "dtype": "float32", "varlen": packed}
    layout = {"state_v_first": call["state_v_first"]}

    transition, offset = poison(followed, HV, 2, K, K), poison(followed, HV, V, K)
    kernel("summary.summary", with_ainv=False, cu_dtype="int32", **common)(table, decay, *walks, transition, offset)
    expected_states = torch.zeros(followed + N, HV, V, K, dtype=torch.float64)
    in_use = [rank for rank, n in enumerate(cut[:, 0].tolist()) if n != UNUSED]
    for rank in in_use:
        n, first, length = cut[rank].tolist()
        if first + length < chunks[n]:
            M, b = torch.eye(K).double().expand(HV, K, K), torch.zeros(HV, K, V).double()
            for entry in range(bases[n] + first, bases[n] + first + length):
                c = used.index(entry)
                own = torch.diag_embed(stages["decay"][c]) - stages["kg"][c].mT @ stages["w"][c]
                M, b = own @ M, own @ b + stages["kg"][c].mT @ stages["u"][c]
            close("M", transition[rank].sum(1), M)
            close("B", offset[rank].mT, b)
        if length:
            expected_states[rank] = starts[bases[n] + first]
        elif initial is not None:  # an empty sequence's
            expected_states[rank] = initial[n] if call["state_v_first"] else initial[n].mT

    states = poison(followed + N, HV, V, K)
    given = () if initial is None else (initial,)
    scanned = kernel("scan.scan", has_initial_state=initial is not None, **layout, **common)
    scanned(transition, offset, *given, runs, states)
    close("states", states[in_use], expected_states[in_use])
    assert states[[rank for rank in range(len(states)) if rank not in in_use]].isnan().all()

    o, final = poison(B, T, HV, V), poison(N, HV, *((V, K) if call["state_v_first"] else (K, V)))
    carried = kernel(
        "carry.carry", with_ainv=False, cu_dtype="int32", cut=True, has_final_state=True, **layout, **common
    )
    walked = expected_states.float()
    if packed:  # the last ones first, so that a state that is stored too early remains
        walks, walked = (cu_seqlens, cut.flip(0).contiguous()), walked.flip(0).contiguous()
    carried(table, decay, walked, *walks, o, final)
    if packed:
        assert o[0, bounds[-1] :].isnan().all(), "a store went past the last sequence"
        o, o_expected = o[:, : bounds[-1]], o_expected[:, : bounds[-1]]
    close("o", o, o_expected)
    close("final_state", final, final_expected)


@pytest.mark.parametrize("gate", GATES)
def test_gates(gate: str | float) -> None:
    stage_by_stage(inputs.stable(2, 300, 2, 64, gate=gate, dtype=torch.float32, initial_state=True), 2)


@pytest.mark.parametrize("T", [64, 65, 128, 129, 192, 321])
def test_tails(T: int) -> None:
    stage_by_stage(inputs.stable(2, T, 1, 64, 128, gate=0.0, dtype=torch.float32, initial_state=True, seed=T), 1)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("lengths", PACKED, ids=lambda x: f"{len(x)}x{x[0]}")
def test_packed(lengths: list[int], size: int) -> None:
    call = inputs.stable(
        1, sum(lengths) + 75, 1, 64, lengths=lengths, gate=-1e-2, dtype=torch.float32, initial_state=size != 2,
        state_v_first=size > 1,
    )  # fmt: skip
    for name in ("q", "k", "v", "g", "beta"):
        call[name][:, sum(lengths) :] = float("nan")
    stage_by_stage(call, size)


def test_near_identical_keys_and_other_head_sizes() -> None:
    stage_by_stage(inputs.collinear(1, 400, 2, 64, dtype=torch.float32, initial_state=True), 2)
    stage_by_stage(inputs.stable(1, 200, 1, 128, 64, gate=0.0, dtype=torch.float32, state_v_first=False), 1)


# ---- whole calls


def run(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    o, state = kda.chunk_kda(**{**call, "output_final_state": True}, backend="tilelang")
    assert state is not None
    return o, state


def test_every_length_up_to_200_in_chunks_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_SPLIT", "1")
    lengths = list(range(201))
    call = inputs.stable(1, sum(lengths), 1, 64, 64, 2, lengths=lengths, gate="mixed", dtype=torch.float32)
    for name, x, y in zip(("o", "state"), run(call), chunk_kda_golden(**call), strict=True):
        close(name, x, y)


def test_a_segments_size_of_ones_own_makes_bits_independent_of_the_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_SPLIT", "2")
    alone = inputs.raw(1, 333, 1, 64, dtype=torch.float32, initial_state=True)
    o, state = run(alone)
    for before, after in (([1, 0, 500], [3]), ([], [90, 400])):
        lengths = [*before, 333, *after]
        packed = inputs.raw(1, sum(lengths), 1, 64, dtype=torch.float32, initial_state=True, lengths=lengths, seed=1)
        start, n = sum(before), len(before)
        for name in ("q", "k", "v", "g", "beta"):
            packed[name][:, start : start + 333] = alone[name]
        packed["initial_state"][n] = alone["initial_state"][0]
        packed |= {name: alone[name] for name in ("A_log", "dt_bias")}
        packed_o, packed_state = run(packed)
        assert torch.equal(packed_o[:, start : start + 333], o) and torch.equal(packed_state[n : n + 1], state)


def test_the_variable_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a call of the same shapes has been made before."""
    launched: list[int] = []

    def noting(call: Any, how: split.Split, *arguments: Any) -> tuple[Any, ...]:
        launched.append(how.size)
        return split.run_split(call, how, *arguments)

    monkeypatch.setattr("kda.backends.tilelang.chunk.run_split", noting)
    call = inputs.stable(1, 200, 1, 64, gate=0.0, dtype=torch.float32)
    whole, _ = run(call)
    assert not launched
    for size in (1, 2):
        monkeypatch.setenv("KDA_SPLIT", str(size))
        o, _ = run(call)
        assert launched[-1] == size and not torch.equal(o, whole)
    monkeypatch.setenv("KDA_SPLIT", "off")
    o, _ = run(call)
    assert len(launched) == 2 and torch.equal(o, whole)


def test_gradients_of_a_cut_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the chunk table kept, which is wider."""
    call = inputs.stable(1, 200, 1, 64, gate=0.0, dtype=torch.float32)
    found = []
    for setting in ("off", "1"):
        monkeypatch.setenv("KDA_SPLIT", setting)
        monkeypatch.setenv("KDA_KEEP_TABLE", "1")
        q = call["q"].clone().requires_grad_()
        o, _ = kda.chunk_kda(**{**call, "q": q}, backend="tilelang")
        found.append((o.detach(), *torch.autograd.grad(o.square().sum(), q)))
    for name, x, y in zip(("o", "dq"), found[1], found[0], strict=True):
        close(name, x, y.double())


def test_a_segment_as_long_as_the_sequences_leaves_them_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_SPLIT", "4")
    call = checked("chunk_kda", **inputs.stable(1, 256, 1, 64))
    with build.collecting():
        assert split.make_split(replace(call, memo={}), with_ainv=False) is None
