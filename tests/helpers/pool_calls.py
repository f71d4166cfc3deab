"""The table of chunk_kda's calls on pools that every backend answers alike: null slots, fresh sequences, dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from decode_calls import Call, hold, placed
from torch import Tensor

import kda
from kda.golden import inputs

LENGTHS = [70, 0, 3, 130, 64, 1]
SLOTS = torch.tensor([7, 3, 0, 4, -1, 16])
"""Sequence 1 is empty, and sequences 2 and 4 start from no slot: what stands in their tokens is NaN."""
BEYOND = torch.tensor([7, 3, 17, 4, 2**32 + 4, 16])
FRESH = torch.tensor([True, False, True, False, True, True])


def pooled(gap: int = 0, dtype: torch.dtype = torch.float32, slots: Tensor = SLOTS, **options: Any) -> Call:
    """Six sequences and padding over 17 slots of [2, 128, 64], of which slot 0 is NaN; rows `gap` apart."""
    call = inputs.stable(1, 270, 1, 64, 128, 2, dtype=torch.float32, lengths=LENGTHS)
    buffer = torch.randn(17, 2, 128, 64 + gap, generator=torch.Generator().manual_seed(1))
    first = 0 if options.get("null_slot", 0) is None else 1
    buffer[:first] = torch.nan
    call |= {"initial_state": placed(buffer[..., :64], "cpu", dtype), "ssm_state_indices": slots} | options
    for n, (start, end) in enumerate(zip(call["cu_seqlens"], call["cu_seqlens"][1:], strict=False)):
        if not first <= slots[n] < 17:
            for name in ("q", "k", "v"):
                call[name][:, start:end] = torch.nan
    return call


def _batch(**options: Any) -> Call:
    return inputs.stable(3, 66, 1, 64, 64, 2, dtype=torch.float32, initial_state=True) | options


CALLS: dict[str, Callable[[], Call]] = {
    "slots": lambda: pooled(),
    "slots in place": lambda: pooled(inplace_final_state=True),
    "slots in place, int32, with gaps": lambda: pooled(16, slots=SLOTS.int(), inplace_final_state=True),
    "slots past the pool, in place": lambda: pooled(slots=BEYOND, inplace_final_state=True),
    "fresh sequences": lambda: pooled(has_initial_state=FRESH),
    "fresh sequences in place": lambda: pooled(has_initial_state=FRESH, inplace_final_state=True),
    "bf16 slots": lambda: pooled(dtype=torch.bfloat16),
    "bf16 slots in place": lambda: pooled(dtype=torch.bfloat16, inplace_final_state=True),
    "fp16 slots in place, fresh sequences": lambda: pooled(
        dtype=torch.float16, has_initial_state=FRESH, inplace_final_state=True
    ),
    "slot 0 is no null slot, in place": lambda: pooled(null_slot=None, inplace_final_state=True),
    "a batch over slots, in place": lambda: _batch(
        initial_state=torch.randn(5, 2, 64, 64), ssm_state_indices=torch.tensor([4, 0, 2]), inplace_final_state=True
    ),
    "a batch in place": lambda: _batch(inplace_final_state=True),
    "a batch of bf16 states, K first": lambda: _batch(
        state_v_first=False, initial_state=torch.randn(3, 2, 64, 64).bfloat16()
    ),
    "a batch with fresh sequences": lambda: _batch(has_initial_state=torch.tensor([True, False, True])),
}  # fmt: skip


def check(name: str, backend: str, limit: float, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """Hold `backend` to the fp64 recurrence on the call `name`."""
    hold(kda.chunk_kda, CALLS[name](), backend, limit, device, dtype)
