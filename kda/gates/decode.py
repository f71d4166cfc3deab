"""Cases of fused_recurrent_kda: decoding after a prefill, state pools, speculative rounds."""

from __future__ import annotations

import torch

from kda.backends.call import PER_TOKEN
from kda.gates.case import O_LIMIT, STATE_LIMIT, Run, case, recurrence, tokens


@case("RECURRENT", "the token recurrence: flags, layouts, packed lengths")
def recurrent(run: Run) -> None:
    stable = run.stable(2, 20, 2, HV=4, initial_state=True)
    calls = {
        "stable": stable,
        "K first": {**stable, "initial_state": stable["initial_state"].mT.contiguous(), "state_v_first": False},
        "packed": run.stable(1, 21, 2, lengths=[1, 0, 4, 16], initial_state=True),
        "softplus": run.raw(2, 20, 2, initial_state=True),
        "lower bound": run.raw(1, 20, 2, lengths=[3, 17], lower_bound=-5.0),
        "negative eigenvalues": {**run.raw(2, 9, 2), "allow_neg_eigval": True},
        "mixed gates": run.stable(1, 40, 2, gate="mixed"),
    }
    for label, inputs in calls.items():
        o, state = run.fused_recurrent_kda(**inputs)
        expected_o, expected_state = recurrence(**inputs)
        run.close(f"{label} o", o, expected_o, O_LIMIT, borders=[])
        run.close(f"{label} state", state, expected_state, STATE_LIMIT)


@case("DECODE", "a prefill and 64 decode steps equal one long recurrence")
def decode(run: Run) -> None:
    end = 200 + run.cut(64, 8)
    inputs = run.raw(2, end, 2)
    o, state = run.chunk_kda(**tokens(inputs, 0, 200))
    outputs = [o]
    for t in range(200, end):
        o, state = run.fused_recurrent_kda(**tokens(inputs, t, t + 1), initial_state=state)
        outputs.append(o)
    expected_o, expected_state = recurrence(**inputs)
    run.close("o", torch.cat(outputs, 1), expected_o, O_LIMIT, borders=[])
    run.close("state", state, expected_state, float("inf"))


@case("POOL", "a state pool in place: other slots keep their bits")
def pool(run: Run) -> None:
    inputs = run.stable(6, 1, 2)
    buffer = torch.full((8, 2, 128, 144), 7.0, dtype=torch.float32, device=run.device)
    states = buffer[..., :128]  # the slot stride is larger than a state
    states[:] = run.stable(8, 1, 2, initial_state=True, seed=1)["initial_state"]
    states[0] = float("nan")
    before = buffer.clone()
    # Null, past the pool, and with another slot's number in the lower 32 bits.
    indices = torch.tensor([3, 0, 6, -1, 8, 2**32 + 3], device=run.device)
    live = {name: inputs[name][[0, 2]] for name in PER_TOKEN}
    expected_o, expected = recurrence(**live, initial_state=states[[3, 6]])
    o, returned = run.fused_recurrent_kda(
        **inputs, initial_state=states, inplace_final_state=True, ssm_state_indices=indices
    )
    run.close("o", o[[0, 2]], expected_o, O_LIMIT, borders=[])
    run.close("state", states[[3, 6]], expected, STATE_LIMIT)
    run.holds("o of null slots", not o[[1, 3, 4, 5]].any(), "o is 0")
    run.holds("returned", returned.data_ptr() == states.data_ptr(), "the caller's own pool is returned")
    untouched = [0, 1, 2, 4, 5, 7]
    run.same_bits("slots not named", buffer[untouched], before[untouched])
    run.same_bits("between the slots' rows", buffer[..., 128:], before[..., 128:])


@case("SPECULATE", "a speculative round with rejections equals the plain run")
def speculate(run: Run) -> None:
    drafted, accepted = 4, [1, 4, 2]
    inputs = run.stable(3, 2 * drafted, 2)
    states = run.stable(14, 1, 2, initial_state=True, seed=2)["initial_state"]
    slots = torch.arange(1, 13, device=run.device, dtype=torch.int32).view(3, drafted)
    start = states[slots[:, 0].long()].clone()
    keywords = {"initial_state": states, "inplace_final_state": True, "ssm_state_indices": slots}
    run.fused_recurrent_kda(**tokens(inputs, 0, drafted), **keywords)
    second, _ = run.fused_recurrent_kda(
        **tokens(inputs, drafted, 2 * drafted), **keywords,
        num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32, device=run.device),
    )  # fmt: skip
    for n, kept in enumerate(accepted):
        history = [*range(kept), *range(drafted, 2 * drafted)]
        plain = {name: inputs[name][n : n + 1, history] for name in PER_TOKEN}
        expected_o, expected = recurrence(**plain, initial_state=start[n : n + 1])
        run.close(f"{kept} accepted, o", second[n : n + 1], expected_o[:, kept:], O_LIMIT, borders=[])
        run.close(f"{kept} accepted, state", states[slots[n, -1].long()], expected[0], STATE_LIMIT)
