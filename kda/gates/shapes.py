"""Cases by shape: fixed lengths, packed sequences, tails, heads and layouts, on the stable inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from kda.backends.call import PER_TOKEN
from kda.gates.case import O_LIMIT, STATE_LIMIT, Run, case, chunked, recurrence, tokens

TAILS = (1, 15, 17, 63, 64, 65, 127, 129, 500, 1000)


@case("L0", "B 1, T 128, H 2")
def l0(run: Run) -> None:
    run.accuracy(run.stable(1, 128, 2))


@case("T1", "B 1, T 512, H 32")
def t1(run: Run) -> None:
    run.accuracy(run.stable(1, 512, run.cut(32, 4)))


@case("P0", "B 1, T 4096, H 16")
def p0(run: Run) -> None:
    run.accuracy(run.stable(1, run.cut(4096, 1024), run.cut(16, 2)))


@case("L2", "B 4, T 8192, H 32")
def l2(run: Run) -> None:
    run.accuracy(run.stable(run.cut(4, 2), run.cut(8192, 640), run.cut(32, 2)))


@case("U0", "B 1, T 384, H 2")
def u0(run: Run) -> None:
    run.accuracy(run.stable(1, 384, 2))


@case("U1", "B 1, T 1920, H 32")
def u1(run: Run) -> None:
    run.accuracy(run.stable(1, 1920, run.cut(32, 1)))


@case("L3", "B 1, T 131072, H 32", slow=True)
def l3(run: Run) -> None:
    run.needs_memory(run.cut(18, 2))
    run.accuracy(run.stable(1, run.cut(131_072, 4_096), run.cut(32, 1)))


@case("V0", "one packed sequence has the bits of fixed length")
def v0(run: Run) -> None:
    for T in (37, 384, 1000):
        fixed = run.stable(1, T, 2, initial_state=True)
        packed = {**fixed, "cu_seqlens": torch.tensor([0, T], dtype=torch.int32, device=run.device)}
        o, state = run.chunk_kda(**fixed)
        packed_o, packed_state = run.chunk_kda(**packed)
        run.same_bits(f"T {T} o", packed_o, o)
        run.same_bits(f"T {T} state", packed_state, state)
    run.accuracy(packed)


@case("V1", "packed lengths 64, 200, 320")
def v1(run: Run) -> None:
    run.accuracy(run.stable(1, 584, 2, lengths=[64, 200, 320]))


@case("V2", "packed lengths 100, 128, 284, initial states")
def v2(run: Run) -> None:
    run.accuracy(run.stable(1, 512, 4, lengths=[100, 128, 284], initial_state=True))


@case("V3", "six packed lengths, int64 cu_seqlens, initial states")
def v3(run: Run) -> None:
    inputs = run.stable(1, 637, 4, lengths=[37, 5, 1, 130, 63, 401], initial_state=True)
    run.accuracy({**inputs, "cu_seqlens": inputs["cu_seqlens"].long()})


@case("V4", "one packed sequence of 4117 tokens")
def v4(run: Run) -> None:
    run.accuracy(run.stable(1, 4117, 4, lengths=[4117]))


@case("T37", "one short chunk, all tail")
def t37(run: Run) -> None:
    run.accuracy(run.stable(1, 37, 2, lengths=[37]))
    run.accuracy(run.stable(2, 37, 2, initial_state=True), "fixed length")


@case("TAILS", "T 1, 15, 17, 63, 64, 65, 127, 129, 500, 1000")
def tails(run: Run) -> None:
    for T in TAILS:
        run.accuracy(run.stable(1, T, 2, initial_state=True), f"T {T}")


@case("LENGTHS", "T = 1 to 200 in turn: each is a prefix of the longest")
def lengths(run: Run) -> None:
    longest = run.stable(1, 200, 1)
    expected, _ = recurrence(**longest)
    worst = 0.0
    for T in range(1, 201, run.cut(1, 13)):
        o, _ = run.chunk_kda(**tokens(longest, 0, T))
        off = ((o - expected[:, :T]).abs() / (O_LIMIT + O_LIMIT * expected[:, :T].abs())).max().item()
        worst = off if off != off else max(worst, off)
        if not worst <= 1:
            break
    run.holds("o", worst <= 1, f"T {T}: the largest error is {worst:.3f} of its limit")


@case("LAYOUT", "K != V and both state layouts")
def layout(run: Run) -> None:
    for K, V in ((128, 64), (64, 128), (128, 128)):
        inputs = run.stable(1, 150, 2, K, V=V, initial_state=True)
        transposed = {**inputs, "initial_state": inputs["initial_state"].mT.contiguous(), "state_v_first": False}
        run.accuracy(inputs, f"K {K} V {V}")
        o, state = run.chunk_kda(**inputs)
        transposed_o, transposed_state = run.chunk_kda(**transposed)
        run.same_bits(f"K {K} V {V}, layouts' o", transposed_o, o)
        run.same_bits(f"K {K} V {V}, layouts' state", transposed_state.mT, state)


@case("GVA", "more value heads than heads: HV 2·H and 4·H")
def gva(run: Run) -> None:
    run.accuracy(run.stable(2, 100, 2, HV=4, initial_state=True), "HV 4 H 2")
    run.accuracy(run.stable(1, 150, 1, HV=4, lengths=[70, 0, 80], initial_state=True), "HV 4 H 1")


@case("EMPTY", "empty sequences: first, last, between, all")
def empty(run: Run) -> None:
    for sizes in ([0, 5, 0, 65], [128, 0, 128], [3, 0], [0, 0]):
        inputs = run.stable(1, sum(sizes), 2, lengths=sizes, initial_state=True)
        run.accuracy(inputs, str(sizes))
        _, state = run.chunk_kda(**inputs)
        for n, size in enumerate(sizes):
            if size == 0:
                run.same_bits(f"{sizes} state {n}", state[n], inputs["initial_state"][n])
        _, state = run.chunk_kda(**{**inputs, "initial_state": None})
        gone = state[[n for n, size in enumerate(sizes) if size == 0]]
        run.holds(f"{sizes} without initial state", not gone.any(), "the final state of an empty sequence is 0")


@case("PREFILL", "one call of 32768 tokens against four of 8192")
def prefill(run: Run) -> None:
    part = run.cut(8_192, 512)
    inputs = run.stable(1, 4 * part, 1)
    o, state = run.chunk_kda(**inputs)
    parts: list[tuple[Tensor, Tensor]] = []
    for start in range(0, 4 * part, part):
        carried = parts[-1][1] if parts else None
        parts.append(run.chunk_kda(**tokens(inputs, start, start + part), initial_state=carried))
    run.close("o", torch.cat([part_o for part_o, _ in parts], 1), o, O_LIMIT, borders=[])
    run.close("state", parts[-1][1], state, STATE_LIMIT)
    run.accuracy(inputs, "one call")


@case("PAIRS", "more than 65,535 (sequence, head) pairs and chunks", slow=True)
def pairs(run: Run) -> None:
    run.needs_memory(run.cut(16, 2))
    N = run.cut(65_600, 40)
    batch = run.stable(N, 1, 1, initial_state=True)
    packed = {name: batch[name].reshape(1, N, *batch[name].shape[2:]) for name in PER_TOKEN}
    cu_seqlens = torch.arange(N + 1, dtype=torch.int32, device=run.device)
    o, state = run.chunk_kda(**packed, initial_state=batch["initial_state"], cu_seqlens=cu_seqlens)
    expected_o, expected_state = chunked(torch.float32, **batch, chunk_size=1)
    run.close("packed o", o[0], expected_o[:, 0], O_LIMIT)
    run.close("packed state", state, expected_state, STATE_LIMIT)
    o, state = run.chunk_kda(**batch)
    run.close("batch o", o, expected_o, O_LIMIT)
    run.close("batch state", state, expected_state, STATE_LIMIT)


@case("INDEX32", "T·H·K past 2^31: the last head equals its own run", slow=True)
def index32(run: Run) -> None:
    run.needs_memory(80)
    small = run.stable(1, 4_096, 8)
    large = {name: small[name].repeat(1, 64, 8, *[1] * (small[name].dim() - 3)) for name in PER_TOKEN}
    assert large["q"].numel() >= 2**31
    o, state = run.chunk_kda(**large)
    alone = {name: x[:, :, -1:].contiguous() for name, x in large.items()}
    expected_o, expected_state = chunked(torch.float64, **alone)
    run.close("last head's o", o[:, :, -1:], expected_o, O_LIMIT, borders=[])
    run.close("last head's state", state[:, -1:], expected_state, STATE_LIMIT)
    run.same_bits("head 7 has the bits of head 63", o[:, :, 7], o[:, :, 63])
