"""Cases of what serving engines ask for: prefill into a pool of states, states of 16 bits, o in the caller's tensor."""

from __future__ import annotations

import torch

from kda import golden
from kda.backends.call import PER_TOKEN
from kda.gates.case import O_LIMIT, STATE_LIMIT, Run, case, recurrence

ROUNDED = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative error of a number that is rounded once, and the share of STATE_LIMIT that such a state may be off beside."""


@case("CHUNKPOOL", "chunk_kda over a pool in place: fresh, empty and null sequences; slot 0 where it is none")
def prefill(run: Run) -> None:
    lengths = [70, 0, run.cut(300, 33), 1, 64, 20]
    inputs = run.stable(1, sum(lengths) + 7, 2, lengths=lengths)
    pool = run.stable(9, 1, 2, initial_state=True, seed=1)["initial_state"]
    before = pool.clone()
    slots = torch.tensor([3, 5, 7, -1, 1, 9], device=run.device)  # 9 is past the pool
    there = torch.tensor([True, False, True, True, False, True], device=run.device)
    start = before[slots.clamp(0, 8)] * there.view(-1, 1, 1, 1)
    expected_o, expected = recurrence(**{**inputs, "initial_state": start})
    out = torch.full_like(inputs["v"], 7.0)
    keywords = {"ssm_state_indices": slots, "has_initial_state": there, "inplace_final_state": True}
    o, returned = run.chunk_kda(**{**inputs, "initial_state": pool}, **keywords, out=out)
    bounds = inputs["cu_seqlens"].tolist()
    for n in (3, 5):
        expected_o[:, bounds[n] : bounds[n + 1]] = 0
    run.close("o", o, expected_o, O_LIMIT, borders=[])
    run.holds("o of null sequences", not o[:, bounds[3] : bounds[4]].any() and not o[:, bounds[5] :].any(), "o is 0")
    run.holds("returned", o.data_ptr() == out.data_ptr() and returned.data_ptr() == pool.data_ptr(),
              "the caller's own tensors are returned")  # fmt: skip
    run.close("states", pool[slots[[0, 2, 4]]], expected[[0, 2, 4]], STATE_LIMIT)
    run.same_bits("slots not named, and the empty sequence's", pool[[0, 2, 4, 5, 6, 8]], before[[0, 2, 4, 5, 6, 8]])
    first = {name: inputs[name][:, : lengths[0]] for name in PER_TOKEN} | {"initial_state": before}
    _, state = run.chunk_kda(**first, ssm_state_indices=slots[:1] * 0, null_slot=None)
    _, expected = recurrence(**{**first, "initial_state": before[:1]})
    run.close("state from slot 0", state, expected, STATE_LIMIT)


@case("STATES16", "states of bf16 and fp16, in a pool and not: computed in fp32, rounded once")
def half(run: Run) -> None:
    inputs = run.stable(3, run.cut(70, 9), 2, initial_state=True)
    for dtype, rounded in ROUNDED.items():
        states = inputs["initial_state"].to(dtype)
        expected_o, expected = recurrence(**{**inputs, "initial_state": states})
        limit = STATE_LIMIT + rounded
        for operator in (run.chunk_kda, run.fused_recurrent_kda):
            pool = torch.cat([states.new_zeros(states[:1].shape), states])
            slots = torch.arange(1, 4, device=run.device, dtype=torch.int32)
            keywords = {"ssm_state_indices": slots, "inplace_final_state": True}
            o, state = operator(**{**inputs, "initial_state": states})
            label = f"{operator.__name__}, {dtype}"
            run.close(f"{label}, o", o, expected_o, O_LIMIT, borders=[])
            run.holds(f"{label}, dtype", state.dtype == dtype, f"{state.dtype}")
            run.close(f"{label}, state", state, expected, limit)
            pooled_o, _ = operator(**{**inputs, "initial_state": pool}, **keywords)
            run.same_bits(f"{label}, o from a pool", pooled_o, o)
            run.same_bits(f"{label}, states in a pool", pool[1:], state)


@case("CHECKPOINT", "the states on the way through chunk_kda: one a sequence, and before every chunk")
def checkpoint(run: Run) -> None:
    lengths = [run.cut(200, 70), 0, 64, 3]
    inputs = run.stable(1, sum(lengths), 2, lengths=lengths, initial_state=True)
    states, chunks = (
        torch.full_like(inputs["initial_state"], 7.0),
        inputs["initial_state"].new_full((9, 2, 128, 128), 7.0),
    )
    offsets = torch.tensor([64, 0, 64, -1], device=run.device)
    run.chunk_kda(**inputs, checkpoint_offsets=offsets, checkpoint_states=states, chunk_states=chunks)
    h = golden.chunk_kda_stages(**inputs)["h"].mT
    run.close("before every chunk", chunks[: len(h)], h, STATE_LIMIT)
    run.holds("rows beyond the chunks", bool((chunks[len(h) :] == 7).all()), "they stay as they are")
    whole = recurrence(**inputs)[1]
    run.close("after 64 tokens", states[[0, 2]], torch.stack([h[1], whole[2]]), STATE_LIMIT)
    run.holds("after no token", torch.equal(states[1], inputs["initial_state"][1]), "the state that it starts from")
    run.holds("no checkpoint", bool((states[3] == 7).all()), "the row stays as it is")
