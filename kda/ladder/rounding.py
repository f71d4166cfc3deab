"""What rounding the state to 16 bits costs, chunk after chunk: the tensor cores multiply nothing wider.

A chunk's output is off by Q_c (round(S_c) - S_c). Each entry of S_c is a sum over all tokens so far, so that error
grows along the sequence; and so does the output itself, of which it is a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kda.golden.constants import CHUNK_SIZE

from .consistency import arguments, inputs
from .levels import level1
from .levels.chunks import split

N, HEADS, D = 16384, 4, 64
DTYPE = torch.float16


@dataclass(frozen=True)
class Rounding:
    """Root mean squares of every chunk `[NC]`, over heads, rows and columns. Chunk 0 has no state to round."""

    output: Tensor
    state_error: Tensor  # of the output, through the rounding of the state alone
    kernel_error: Tensor | None  # of the output of `linattn_seq_in_loop`, where there is a GPU to run it

    def growth(self) -> dict[str, float]:
        """b of the fit of c^b to each of them, and to the state's error over the output, over the chunks c > 0."""
        series = {"output": self.output, "error by rounding the state": self.state_error,
                  "the same over the output": self.state_error / self.output}  # fmt: skip
        if self.kernel_error is not None:
            series["error of the kernel"] = self.kernel_error
        return {name: fitted_exponent(list(enumerate(x.tolist()))[1:]) for name, x in series.items()}


def measure(device: torch.device, kernel: Callable[..., Tensor] | None) -> Rounding:
    """For q, k, v ~ N(0, 1) in `DTYPE` and, where there is one, the kernel on them; everything else in fp64."""
    q, k, v = (x.to(device, DTYPE) for x in arguments(1, inputs(1, N, HEADS, D, D)))
    qc, kc, vc = (split(x, CHUNK_SIZE) for x in (q, k, v))
    states = level1.prefix_states(kc, vc)
    expected = split(level1.chunked(q, k, v, CHUNK_SIZE), CHUNK_SIZE)
    error = None if kernel is None else _rms(split(kernel(q, k, v), CHUNK_SIZE) - expected)
    return Rounding(_rms(expected), _rms(qc @ (states.to(DTYPE).double() - states)), error)


def fitted_exponent(points: Sequence[tuple[float, float]]) -> float:
    """b of the least-squares fit of log y = a + b log x."""
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in zip(*points, strict=True))
    x = x - x.mean()
    return (x @ y / (x @ x)).item()


def _rms(x: Tensor) -> Tensor:
    """Of `[B, H, NC, BC, V]`, per chunk."""
    return x.square().mean((0, 1, 3, 4)).sqrt().cpu()
