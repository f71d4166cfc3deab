"""`python -m kda.golden`: the golden checks itself against the token recurrence; exit code 1 on failure."""

from __future__ import annotations

import sys
from typing import Any

import torch

from . import inputs
from .chunk import chunk_kda_golden
from .compare import Comparison, compare
from .recurrence import recurrent_kda_golden

LENGTHS = [64, 1, 0, 200, 37, 128]


def self_check() -> dict[str, Comparison]:
    """Fixed length in fp32 (1e-3) and bf16 (1e-2), and a ragged batch against each sequence's own recurrence."""
    results: dict[str, Comparison] = {}
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 1e-2)):
        call = inputs.stable(2, 300, 2, 64, dtype=dtype, initial_state=True)
        actual, expected = chunk_kda_golden(**call, dtype=torch.float32), recurrent_kda_golden(**call)
        for name, a, e in zip(("o", "final state"), actual, expected, strict=True):
            label = f"fixed length, {str(dtype).removeprefix('torch.')}, {name}"
            results[label] = compare(a.to(dtype), e, atol=tolerance, rtol=tolerance, max_rel_rmse=tolerance)

    call = inputs.raw(1, sum(LENGTHS), 2, 64, lengths=LENGTHS, dtype=torch.float32, initial_state=True)
    o, state = chunk_kda_golden(**call, dtype=torch.float32)
    start = 0
    for n, length in enumerate(LENGTHS):
        at = slice(start, start + length)
        expected = recurrent_kda_golden(**_one_sequence(call, n, at))
        for name, a, e in zip(("o", "final state"), (o[:, at], state[n : n + 1]), expected, strict=True):
            results[f"varlen, sequence of {length}, {name}"] = compare(a, e, atol=1e-3, rtol=1e-3, max_rel_rmse=1e-3)
        start += length
    return results


def _one_sequence(call: dict[str, Any], n: int, at: slice) -> dict[str, Any]:
    alone = {name: x for name, x in call.items() if name != "cu_seqlens"}
    alone |= {name: call[name][:, at] for name in ("q", "k", "v", "g", "beta")}
    return alone | {"initial_state": call["initial_state"][n : n + 1]}


if __name__ == "__main__":
    checks = self_check()
    for label, comparison in checks.items():
        print(f"{label}: {comparison}")
    sys.exit(0 if all(c.ok for c in checks.values()) else 1)
