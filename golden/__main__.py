"""`python -m kda.golden`: the golden checks itself against the token recurrence; exit code 1 on failure."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from . import inputs
from .backward import chunk_kda_backward_golden
from .chunk import chunk_kda_golden
from .compare import Comparison, compare
from .recurrent import recurrent_kda_golden

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 1e-2}
LENGTHS = [64, 1, 0, 130, 37]

STEP, SLOPE_TOLERANCE = 1e-5, 1e-6
"""Of the differences that gradients are held to; in fp64 these are good to about 1e-8."""

Result = tuple[torch.Tensor, torch.Tensor | None]


def self_check() -> dict[str, Comparison]:
    """Fixed length with inputs and outputs in each dtype, and a ragged batch against each sequence's own recurrence.

    The tolerance is absolute, relative and the limit of the relative RMSE at once. bf16 runs through fp32 stages.
    """
    results: dict[str, Comparison] = {}

    def hold(label: str, actual: Result, expected: Result, tol: float) -> None:
        for name, a, e in zip(("o", "final state"), actual, expected, strict=True):
            assert a is not None and e is not None, "every call here asks for the state"
            results[f"{label}, {name}"] = compare(a.to(dtype), e, atol=tol, rtol=tol, max_rel_rmse=tol)

    for dtype, tolerance in TOLERANCES.items():
        call = inputs.stable(2, 150, 2, 64, dtype=dtype, initial_state=True)
        actual = chunk_kda_golden(**call, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        label = f"fixed length, {str(dtype).removeprefix('torch.')}"
        hold(label, actual, recurrent_kda_golden(**call), tolerance)

    call = inputs.raw(1, sum(LENGTHS), 2, 32, lengths=LENGTHS, dtype=torch.float32, initial_state=True)
    o, state = chunk_kda_golden(**call, dtype=torch.float32)
    assert state is not None
    dtype, start = torch.float32, 0
    for n, length in enumerate(LENGTHS):
        tokens = slice(start, start + length)
        expected = recurrent_kda_golden(**_alone(call, n, tokens))
        hold(f"varlen, sequence of {length}", (o[:, tokens], state[n : n + 1]), expected, TOLERANCES[torch.float32])
        start += length
    return results


def gradient_check() -> dict[str, Comparison]:
    """The gradient of each argument, along a random direction, against how the recurrence's results change with it."""
    call = inputs.raw(1, sum(LENGTHS), 2, 16, HV=4, lengths=LENGTHS, dtype=torch.float64, initial_state=True)
    generator = torch.Generator("cpu").manual_seed(1)

    def draw(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu")

    do, d_state = draw(call["v"]), draw(call["initial_state"])

    def loss(**changed: torch.Tensor) -> torch.Tensor:
        o, state = recurrent_kda_golden(**call | changed)
        assert state is not None, "the call asks for the state"
        return (o * do).sum() + (state * d_state).sum()

    results: dict[str, Comparison] = {}
    for name, gradient in chunk_kda_backward_golden(do, d_state, **call).items():
        direction = draw(gradient)
        after, before = (loss(**{name: call[name] + step * direction}) for step in (STEP, -STEP))
        slope = (after - before) / (2 * STEP)
        actual = (gradient * direction).sum()
        results[f"gradient of {name}"] = compare(actual, slope, atol=SLOPE_TOLERANCE, rtol=SLOPE_TOLERANCE)
    return results


def _alone(call: dict[str, Any], n: int, tokens: slice) -> dict[str, Any]:
    """The n-th sequence of a TND call as a fixed-length call of its own."""
    alone = {name: x for name, x in call.items() if name != "cu_seqlens"}
    alone |= {name: call[name][:, tokens] for name in ("q", "k", "v", "g", "beta")}
    return alone | {"initial_state": call["initial_state"][n : n + 1]}


def main(argv: Sequence[str] | None = None) -> int:
    description = "The golden checks itself: its chunked form and its gradients against the token recurrence. "
    description += "Exit code 1 on failure."
    argparse.ArgumentParser(prog="python -m kda.golden", description=description).parse_args(argv)
    checks = self_check() | gradient_check()
    for label, comparison in checks.items():
        print(f"{label}: {comparison}")
    return 0 if all(c.ok for c in checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
