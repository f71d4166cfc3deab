"""KDA_CHECK=1: each check of values fires with its message, passes on good input, and is off by default."""

from __future__ import annotations

import re

import pytest
import torch
from calls import CU, HV, PARAMETERS, B, K, S, V, dense, packed, pool, without
from torch import Tensor

from kda.checks import checked

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def checking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_CHECK", "1")


def spoilt(call: dict[str, object], name: str, place: tuple[int, ...], value: float) -> dict[str, object]:
    """The call with one element of one argument replaced."""
    x: Tensor = call[name].clone()
    x[place] = value
    return call | {name: x}


def slots(*rows: object) -> Tensor:
    return torch.tensor(rows)


STATE = torch.zeros(B, HV, V, K)
DRAFTED = packed(initial_state=torch.zeros(8, HV, V, K), ssm_state_indices=slots([1, 2], [3, 0], [4, 5]),
                 inplace_final_state=True)  # fmt: skip

BAD = {
    "NaN in q": (spoilt(dense(), "q", (1, 2, 0, 7), NAN), "q: expected finite values, got nan at [1, 2, 0, 7]"),
    "inf in k": (spoilt(dense(), "k", (0, 0, 1, 3), INF), "k: expected finite values, got inf at [0, 0, 1, 3]"),
    "inf in v": (spoilt(dense(), "v", (1, 0, 3, 3), -INF), "v: expected finite values, got -inf at [1, 0, 3, 3]"),
    "NaN in beta": (spoilt(dense(), "beta", (1, 1, 2), NAN), "beta: expected finite values, got nan at [1, 1, 2]"),
    "growth": (spoilt(dense(), "g", (0, 2, 1, 5), 0.5), "g: expected log decays in [-inf, 0], got 0.5 at [0, 2, 1, 5]"),
    "NaN in g": (spoilt(dense(), "g", (0, 0, 0, 0), NAN),
        "g: expected log decays in [-inf, 0], got nan at [0, 0, 0, 0]"),
    "inf in the raw gate": (spoilt(dense(**PARAMETERS), "g", (0, 0, 0, 0), -INF),
        "g: expected finite values (raw gate), got -inf at [0, 0, 0, 0]"),
    "NaN in A_log": (spoilt(dense(**PARAMETERS), "A_log", (3,), NAN), "A_log: expected finite values, got nan at [3]"),
    "NaN in dt_bias": (spoilt(dense(**PARAMETERS), "dt_bias", (K + 2,), NAN),
        "dt_bias: expected finite values, got nan at [10]"),
    "NaN in the state": (spoilt(dense(initial_state=STATE), "initial_state", (1, 0, 3, 7), NAN),
        "initial_state: expected finite values, got nan at [1, 0, 3, 7]"),
    "cu_seqlens from -1": (packed(cu_seqlens=slots(-1, 3)),
        "cu_seqlens: expected 0 or more first, no decrease, and at most T = 3 last, got [-1, 3]"),
    "cu_seqlens falling": (packed(cu_seqlens=slots(0, 2, 1, 3)),
        "cu_seqlens: expected 0 or more first, no decrease, and at most T = 3 last, got [0, 2, 1, 3] "
        "(falls at index 2)"),
    "cu_seqlens past T": (packed(cu_seqlens=slots(0, 4)),
        "cu_seqlens: expected 0 or more first, no decrease, and at most T = 3 last, got [0, 4]"),
    "a slot too high": (spoilt(pool(), "ssm_state_indices", (1, 0), 7),
        "ssm_state_indices: expected slots below 7, got 7 at [1, 0] (sequence 1)"),
    "none accepted": (spoilt(pool(), "num_accepted_tokens", (1,), 0),
        "num_accepted_tokens: expected values in 1..3, got 0 at [1] (sequence 1)"),
    "too many accepted": (spoilt(pool(), "num_accepted_tokens", (0,), S + 1),
        "num_accepted_tokens: expected values in 1..3, got 4 at [0] (sequence 0)"),
    "NaN in a start slot": (spoilt(pool(), "initial_state", (4, 0, 1, 2), NAN),
        "initial_state[4]: expected finite values, got nan at [0, 1, 2]"),
    "NaN in an accepted slot": (
        spoilt(spoilt(pool(), "num_accepted_tokens", (0,), 3), "initial_state", (3, 0, 0, 0), NAN),
        "initial_state[3]: expected finite values, got nan at [0, 0, 0]"),
    "a sequence longer than S": (DRAFTED | {"cu_seqlens": slots(0, 3, 3, 3)},
        "ssm_state_indices: expected S >= the longest sequence 3, got S = 2"),
    "two sequences write a slot": (DRAFTED | {"ssm_state_indices": slots([1, 2], [3, 0], [2, 4])},
        "ssm_state_indices: expected distinct slots with inplace_final_state, got slot 2 for sequences 0 and 2"),
    "one sequence writes a slot twice": (DRAFTED | {"ssm_state_indices": slots([1, 1], [3, 0], [2, 4])},
        "ssm_state_indices: expected distinct slots with inplace_final_state, got slot 1 for sequences 0 and 0"),
    "flat indices repeat": (pool(ssm_state_indices=slots(2, 2), num_accepted_tokens=None),
        "ssm_state_indices: expected distinct slots with inplace_final_state, got slot 2 for sequences 0 and 1"),
    "a start slot that another one writes": (
        DRAFTED | {"ssm_state_indices": slots([1, 2], [3, 0], [4, 1]), "num_accepted_tokens": slots(1, 1, 2),
                   "cu_seqlens": slots(0, 2, 2, 3)},
        "ssm_state_indices: expected start slots that no other sequence writes, got slot 1, where sequence 2 starts "
        "and sequence 0 writes"),
}  # fmt: skip

GOOD = {
    "dense": dense(),
    "-inf and 0 in g": spoilt(spoilt(dense(), "g", (0, 0, 0, 0), -INF), "g", (0, 1, 0, 0), 0.0),
    "a positive raw gate": spoilt(dense(**PARAMETERS), "g", (0, 0, 0, 0), 3.0),
    "NaN in the padding": spoilt(spoilt(packed(cu_seqlens=slots(0, 1, 2)), "q", (2, 0, 0), NAN), "g", (2, 0, 0), NAN),
    "all padding": packed(cu_seqlens=slots(0, 0), **{n: torch.full_like(packed()[n], NAN) for n in "qkv"}),
    "an empty sequence": packed(initial_state=torch.zeros(CU.numel() - 1, HV, V, K)),
    "no token": {name: x[:, :0] for name, x in dense().items()},
    "no sequence": {name: x[:0] for name, x in dense().items()},
    "a pool": pool(),
    "NaN in slots that nobody reads": spoilt(spoilt(pool(), "initial_state", (0, 0, 0, 0), NAN), "initial_state",
                                             (2, 0, 0, 0), NAN),
    "NaN in a null sequence": spoilt(pool(ssm_state_indices=slots([1, 2, 3], [-1, 1, 1])), "q", (1, 0, 0, 0), NAN),
    "drafted": DRAFTED,
    "repeats that are never written": DRAFTED | {"ssm_state_indices": slots([1, 2], [3, 1], [4, 2])},
    "repeats in null slots": DRAFTED | {"ssm_state_indices": slots([1, 0], [0, 0], [0, 4]),
                                        "num_accepted_tokens": slots(1, 1, 2)},
    "NaN in the null slot": spoilt(pool(ssm_state_indices=slots([0, 2, 3], [4, 5, 6])), "initial_state", (0, 0, 0, 0),
                                   NAN),
    "readers may share a slot": pool(ssm_state_indices=slots(2, 2), num_accepted_tokens=None,
                                     inplace_final_state=False),
}  # fmt: skip


POOL = without(pool(), "num_accepted_tokens") | {"ssm_state_indices": slots(2, 2), "inplace_final_state": True}
BAD_CHUNK = {
    "two sequences write a slot": (POOL,
        "ssm_state_indices: expected distinct slots with inplace_final_state, got slot 2 for sequences 0 and 1"),
    "two sequences write slot 0": (POOL | {"ssm_state_indices": slots(0, 0), "null_slot": None},
        "ssm_state_indices: expected distinct slots with inplace_final_state, got slot 0 for sequences 0 and 1"),
    "a slot too high": (POOL | {"ssm_state_indices": slots(2, 7)},
        "ssm_state_indices: expected slots below 7, got 7 at [1] (sequence 1)"),
    "NaN in a slot that is read": (
        spoilt(POOL | {"ssm_state_indices": slots(2, 3), "has_initial_state": slots(False, True)}, "initial_state",
               (3, 0, 0, 0), NAN), "initial_state[3]: expected finite values, got nan at [0, 0, 0]"),
    "NaN in a row that is read": (
        spoilt(dense(initial_state=STATE, has_initial_state=slots(False, True)), "initial_state", (1, 0, 0, 0), NAN),
        "initial_state: expected finite values, got nan at [1, 0, 0, 0]"),
}  # fmt: skip
CHECKPOINTS = {"checkpoint_states": STATE, "checkpoint_offsets": slots(-1, 0)}
BAD_CHUNK |= {
    "a checkpoint inside of a chunk": (dense(**CHECKPOINTS | {"checkpoint_offsets": slots(0, 2)}),
        "checkpoint_offsets: expected multiples of 64 within the sequence, or -1, got 2 at [1] (sequence 1)"),
    "a checkpoint behind the end": (dense(**CHECKPOINTS | {"checkpoint_offsets": slots(64, 0)}),
        "checkpoint_offsets: expected multiples of 64 within the sequence, or -1, got 64 at [0] (sequence 0)"),
}  # fmt: skip
GOOD_CHUNK = {
    "checkpoints": dense(**CHECKPOINTS),
    "NaN in a slot of a fresh sequence": spoilt(
        POOL | {"ssm_state_indices": slots(2, 3), "has_initial_state": slots(False, True)}, "initial_state",
        (2, 0, 0, 0), NAN),
    "NaN in a row of a fresh sequence": spoilt(
        dense(initial_state=STATE, has_initial_state=slots(False, True)), "initial_state", (0, 0, 0, 0), NAN),
    "slot 0 twice, which is none": POOL | {"ssm_state_indices": slots(0, 0)},
}  # fmt: skip


@pytest.mark.parametrize("arguments, message", BAD_CHUNK.values(), ids=BAD_CHUNK)
def test_fires_in_chunk_kda(arguments, message) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        checked("chunk_kda", **arguments)


@pytest.mark.parametrize("arguments", GOOD_CHUNK.values(), ids=GOOD_CHUNK)
def test_passes_in_chunk_kda(arguments) -> None:
    checked("chunk_kda", **arguments)


@pytest.mark.parametrize("arguments, message", BAD.values(), ids=BAD)
def test_fires(arguments, message, monkeypatch) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        checked("fused_recurrent_kda", **arguments)
    for off in ("", "0"):
        monkeypatch.setenv("KDA_CHECK", off)
        checked("fused_recurrent_kda", **arguments)


@pytest.mark.parametrize("arguments", GOOD.values(), ids=GOOD)
def test_passes(arguments) -> None:
    checked("fused_recurrent_kda", **arguments)
