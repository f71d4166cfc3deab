"""The table of decoding calls that every backend answers alike: flags, layouts, packed lengths, pools, drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import kda
from kda.golden import inputs, recurrent_kda_golden, rel_rmse

Call = dict[str, Any]

LENGTHS = [3, 0, 2, 3, 1, 1]
SLOTS = torch.tensor([[7, 3, 12], [9, 15, 2], [0, 5, 6], [4, 0, 10], [-1, 11, 13], [16, 17, 18]])
"""Sequence 1 is empty; 2 and 4 start from null slots unless they have accepted a token more; 3 has one later on."""

BEYOND = torch.where(SLOTS == 9, 19, torch.where(SLOTS == 16, 2**32 + 3, torch.where(SLOTS == 5, 2**40, SLOTS)))
"""SLOTS with some that are not of the pool, or only in their lower 32 bits."""


def _stable(*sizes: int, **options: Any) -> Call:
    return inputs.stable(*sizes, dtype=torch.float32, **options)


def _raw(*sizes: int, **options: Any) -> Call:
    return inputs.raw(*sizes, dtype=torch.float32, **options)


def pooled(gap: int = 0, state_v_first: bool = True, **options: Any) -> Call:
    """Six short sequences and padding over 19 slots of [2, 128, 64], of which slot 0 is NaN; rows `gap` apart."""
    call = _stable(1, 12, 1, 64, 128, 2, lengths=LENGTHS, state_v_first=state_v_first)
    rows, columns = (128, 64) if state_v_first else (64, 128)
    buffer = torch.randn(19, 2, rows, columns + gap, generator=torch.Generator().manual_seed(1))
    buffer[0] = torch.nan
    return call | {"initial_state": buffer[..., :columns]} | options


def _from_zero(**options: Any) -> Call:
    """The same, where slot 0 is one like any other."""
    call = pooled(null_slot=None, **options)
    call["initial_state"][0] = 0.5
    return call


def _half(dtype: torch.dtype, call: Call) -> Call:
    """The call with states of 16 bits, strides and all."""
    return call | {"initial_state": placed(call["initial_state"], "cpu", dtype)}


ROUNDING = {torch.float32: 0.0, torch.bfloat16: 1.8e-3, torch.float16: 2.3e-4}
"""Relative RMSE of numbers that are rounded once to nearest."""


def _apart(distance: int, offset: int) -> Tensor:
    """A pool of dense slots so many elements apart, so many from the start of their memory."""
    memory = torch.randn(19 * distance + offset, generator=torch.Generator().manual_seed(1))
    return memory.as_strided((19, 2, 128, 64), (distance, 128 * 64, 64, 1), offset)


CALLS: dict[str, Callable[[], Call]] = {
    "batch, GVA, V > K": lambda: _stable(3, 2, 2, 64, 128, 4, initial_state=True),
    "packed, padded, no state": lambda: _stable(1, 9, 1, 64, lengths=[1, 0, 4]),
    "K first": lambda: _stable(2, 2, 1, 128, 64, initial_state=True, state_v_first=False),
    "strong gates": lambda: _stable(1, 30, 1, 64, gate="mixed", initial_state=True),
    "norm, softplus gate, sigmoid": lambda: _raw(2, 3, 1, 64, initial_state=True),
    "bounded gate, 2 sigmoid, int64": lambda: (
        lambda call: call | {"cu_seqlens": call["cu_seqlens"].long()}
    )(_raw(1, 5, 1, 64, lengths=[2, 3], lower_bound=-5.0, allow_neg_eigval=True)),
    "gates beyond fp32": lambda: (
        lambda call: call | {"A_log": call["A_log"] + 200.0, "g": call["g"] - 300.0}
    )(_raw(1, 3, 1, 64, initial_state=True)),
    "in place": lambda: _stable(2, 2, 1, 64, initial_state=True) | {"inplace_final_state": True},
    "slots": lambda: pooled(ssm_state_indices=SLOTS[:, 0]),
    "slots in place": lambda: pooled(ssm_state_indices=SLOTS[:, 0].int(), inplace_final_state=True),
    "slots in place, with gaps": lambda: pooled(16, ssm_state_indices=SLOTS[:, 0], inplace_final_state=True),
    "slots in place, odd address": lambda: pooled(
        ssm_state_indices=SLOTS[:, 0], inplace_final_state=True
    ) | {"initial_state": _apart(2 * 128 * 64, 1)},
    "slots in place, odd distance": lambda: pooled(
        ssm_state_indices=SLOTS[:, 0], inplace_final_state=True
    ) | {"initial_state": _apart(2 * 128 * 64 + 3, 0)},
    "slots in place, apart": lambda: pooled(
        ssm_state_indices=SLOTS[:, 0], inplace_final_state=True
    ) | {"initial_state": _apart(2 * 128 * 64 + 8, 0)},
    "null slots of 64 bits": lambda: pooled(
        ssm_state_indices=torch.where(SLOTS < 1, 1 - 2**32, SLOTS), inplace_final_state=True
    ),
    "slots past the pool": lambda: pooled(ssm_state_indices=BEYOND[:, 0], inplace_final_state=True),
    "drafts with slots past the pool": lambda: pooled(ssm_state_indices=BEYOND, inplace_final_state=True),
    "counts out of range": lambda: pooled(
        ssm_state_indices=SLOTS, num_accepted_tokens=torch.tensor([4, 1, 0, 2**32 + 1, -1, 3]), inplace_final_state=True
    ),
    "more tokens than slots": lambda: pooled(ssm_state_indices=SLOTS[:, :2].contiguous(), inplace_final_state=True),
    "more tokens than slots, new states": lambda: pooled(ssm_state_indices=SLOTS[:, :2].contiguous()),
    "padding before the first sequence": lambda: (
        lambda call: call | {"cu_seqlens": call["cu_seqlens"] + 2}
    )(pooled(ssm_state_indices=SLOTS)),
    "rows whose squares are beyond fp32": lambda: (
        lambda call: call | {"q": call["q"] * 1e20, "k": torch.cat([call["k"][:, :1] * 1e30, call["k"][:, 1:]], 1)}
    )(_raw(2, 3, 1, 64, initial_state=True)),
    "negative views": lambda: (lambda call: call | {n: torch._neg_view(call[n]) for n in ("q", "initial_state")})(
        _stable(1, 2, 1, 64, initial_state=True)
    ),
    "drafts": lambda: pooled(ssm_state_indices=SLOTS),
    "bf16 states": lambda: _half(torch.bfloat16, _stable(2, 2, 1, 64, initial_state=True)),
    "fp16 states in place, K first": lambda: _half(
        torch.float16, _stable(2, 2, 1, 128, 64, initial_state=True, state_v_first=False)
    ) | {"inplace_final_state": True},
    "bf16 slots in place": lambda: _half(
        torch.bfloat16, pooled(ssm_state_indices=SLOTS[:, 0].int(), inplace_final_state=True)
    ),
    "bf16 slots in place, with gaps": lambda: _half(
        torch.bfloat16, pooled(16, ssm_state_indices=SLOTS[:, 0], inplace_final_state=True)
    ),
    "bf16 slots": lambda: _half(torch.bfloat16, pooled(ssm_state_indices=SLOTS[:, 0])),
    "fp16 drafts in place": lambda: _half(torch.float16, pooled(ssm_state_indices=SLOTS, inplace_final_state=True)),
    "bf16 accepted drafts": lambda: _half(
        torch.bfloat16, pooled(ssm_state_indices=SLOTS, num_accepted_tokens=torch.tensor([3, 1, 2, 1, 2, 3]))
    ),
    "slot 0 is no null slot": lambda: _from_zero(ssm_state_indices=SLOTS[:, 0]),
    "slot 0 is no null slot, in place": lambda: _from_zero(
        ssm_state_indices=SLOTS[:, 0].int(), inplace_final_state=True
    ),
    "drafts over slot 0, in place": lambda: _from_zero(ssm_state_indices=SLOTS - 1, inplace_final_state=True),
    "bf16 slot 0 in place": lambda: _half(
        torch.bfloat16, _from_zero(ssm_state_indices=SLOTS[:, 0], inplace_final_state=True)
    ),
    "drafts in place, K first": lambda: pooled(
        state_v_first=False, ssm_state_indices=SLOTS.int(), inplace_final_state=True
    ),
    "accepted drafts in place, with gaps": lambda: pooled(
        3, ssm_state_indices=SLOTS, num_accepted_tokens=torch.tensor([3, 1, 2, 1, 1, 3]), inplace_final_state=True
    ),
    "accepted drafts": lambda: pooled(
        ssm_state_indices=SLOTS.int(), num_accepted_tokens=torch.tensor([3, 1, 2, 1, 2, 3], dtype=torch.int32)
    ),
}  # fmt: skip


def check(name: str, backend: str, limit: float, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """Hold `backend` to the fp64 recurrence on the call `name`: o and states; what it must not touch keeps its bits."""
    hold(kda.fused_recurrent_kda, CALLS[name](), backend, limit, device, dtype)


def hold(
    operator: Callable[..., tuple[Tensor, Tensor]],
    call: Call,
    backend: str,
    limit: float,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> None:
    """The same for a call of either operator."""
    call = {key: placed(x, device, dtype if key in ("q", "k", "v") else None) for key, x in call.items()}
    expected_o, expected = recurrent_kda_golden(**call)
    assert expected_o.any() and expected.nan_to_num().any()
    pool = call.get("initial_state")
    before = None if pool is None else _storage(pool).clone()
    o, states = operator(**call, backend=backend)
    assert o.dtype == dtype and states.dtype == (torch.float32 if pool is None else pool.dtype)
    state_limit = limit + ROUNDING[states.dtype]
    assert not o[expected_o == 0].any(), "padding and null sequences"
    assert rel_rmse(o, expected_o) <= limit
    named = call.get("ssm_state_indices")
    if call.get("inplace_final_state"):
        assert states is pool
        assert rel_rmse(pool.nan_to_num(), expected.nan_to_num()) <= state_limit
        first = 0 if call.get("null_slot", 0) is None else 1
        written = (
            torch.ones(len(pool), dtype=torch.bool, device=device) if named is None else _named(pool, named, first)
        )
        was = before.as_strided(pool.shape, pool.stride(), pool.storage_offset())
        assert same_bits(pool[~written], was[~written]), "slots that are not named"
        pool.copy_(was)
        assert same_bits(_storage(pool), before), "memory between the slots"
    else:
        assert rel_rmse(states, expected) <= state_limit
        assert pool is None or same_bits(_storage(pool), before), "a pool that is only read"


DRAFTS: dict[str, dict[str, Any]] = {
    "rows in order": {"rows": 6, "steps": 3},
    "named rows": {"rows": 9, "steps": 4, "indices": torch.tensor([7, 8, 0, -1, 9, 2], dtype=torch.int32)},
    "fewer steps than tokens, bf16": {"rows": 6, "steps": 2, "dtype": torch.bfloat16},
    "fp16, in place, with gaps": {"rows": 7, "steps": 3, "dtype": torch.float16, "gap": 8, "inplace": True},
    "states that are returned": {"rows": 6, "steps": 3, "output": True},
}


def check_drafts(name: str, backend: str, limit: float, device: str = "cpu") -> None:
    """Each token's state in a buffer of its own: held to the states of the same call with a slot a token."""
    options = {"dtype": torch.float32, "gap": 0, "inplace": False, "output": False, "indices": None} | DRAFTS[name]
    call = {key: placed(x, device, None) for key, x in pooled(ssm_state_indices=SLOTS[:, 0]).items()}
    call["output_final_state"] = options["output"]
    pool = call["initial_state"]
    before = pool.clone()
    by_token = call["ssm_state_indices"][:, None].expand(-1, 3)
    states = recurrent_kda_golden(**call | {"ssm_state_indices": by_token, "output_final_state": True})[1]
    expected_o, final = recurrent_kda_golden(**call | {"inplace_final_state": options["inplace"]})
    rows, steps = options["rows"], options["steps"]
    buffer = torch.full((rows, steps, 2, 128, 64 + options["gap"]), 7.0, dtype=options["dtype"], device=device)[
        ..., :64
    ]
    expected = buffer.double()
    keywords: Call = {"intermediate_states_buffer": buffer, "inplace_final_state": options["inplace"]}
    if options["indices"] is not None:
        keywords["intermediate_state_indices"] = options["indices"].to(device)
    named = range(6) if options["indices"] is None else options["indices"].tolist()
    for n, (row, start, length) in enumerate(zip(named, call["cu_seqlens"].tolist(), LENGTHS, strict=False)):
        kept = min(length, steps) if 0 < SLOTS[n, 0] < 19 and 0 <= row < rows else 0
        if kept:
            expected[row, :kept] = states[start : start + kept]
    o, returned = kda.fused_recurrent_kda(**call | keywords, backend=backend)
    assert rel_rmse(o, expected_o) <= limit and rel_rmse(buffer, expected) <= limit + ROUNDING[options["dtype"]]
    assert (buffer[expected == 7] == 7).all(), "what is not written"
    if options["inplace"]:
        assert rel_rmse(pool.nan_to_num(), final.nan_to_num()) <= limit
    else:
        assert same_bits(pool, before), "a pool that is only read"
    assert (returned is not None) == options["output"]
    assert returned is None or rel_rmse(returned, final) <= limit


def _named(pool: Tensor, indices: Tensor, first: int) -> Tensor:
    """Which slots of the pool the indices name."""
    named = torch.zeros(len(pool), dtype=torch.bool, device=pool.device)
    named[indices[(indices >= first) & (indices < len(pool))].long()] = True
    return named


def placed(x: Any, device: str, dtype: torch.dtype | None) -> Any:
    """x on the device, strides and the memory between them included."""
    if not isinstance(x, Tensor):
        return x
    if x.is_neg():
        return torch._neg_view(placed(torch._neg_view(x), device, dtype))
    return _storage(x).clone().to(device=device, dtype=dtype).as_strided(x.shape, x.stride(), x.storage_offset())


def _storage(x: Tensor) -> Tensor:
    """All of the memory that x is a view of, flat."""
    x = torch._neg_view(x) if x.is_neg() else x
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
