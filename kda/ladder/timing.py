"""The GPU's side of the ladder: both kernels of level 1 and causal softmax attention against N, every level's error."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kda
from kda import backends
from kda.bench.measure import graph_seconds, median_seconds
from kda.golden import rel_rmse
from kda.golden.constants import CHUNK_SIZE

from . import kernels
from .consistency import FORMS, arguments, inputs
from .rounding import fitted_exponent

DEVICE = torch.device("cuda", 0)

LENGTHS = tuple(512 * 2**i for i in range(8))
"""512 to 65536 tokens."""

FIT_FROM = 8192
"""Exponents are fitted to the times from here on: below, launches and idle multiprocessors count as well."""

ATTENTION = "scaled_dot_product_attention"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

ERROR_LIMIT = 5e-3
ERROR_SHAPE = {"B": 1, "N": 1000, "H": 4}  # no multiple of the chunk
TIME_SHAPE = {"B": 1, "N": 8192, "H": 32}


def missing(D: int) -> list[str]:
    """Why nothing can be measured here for heads of D channels; empty if it can."""
    if not torch.cuda.is_available():
        return ["there is no CUDA device"]
    reasons = backends.unusable("tilelang")
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        reasons.append(f"the kernels are for Hopper GPUs (compute capability 9.0), this one has {capability}")
    if D not in kernels.HEAD_DIMS:
        reasons.append(f"the kernels take --D {' or '.join(map(str, kernels.HEAD_DIMS))}, got {D}")
    return reasons


@dataclass(frozen=True)
class Times:
    """Median seconds of each contestant at each of `lengths`; one sequence, D = K = V, fp16."""

    lengths: tuple[int, ...]
    seconds: dict[str, list[float]]

    def exponent(self, name: str) -> float:
        """b of the least-squares fit of a N^b to the times from `FIT_FROM` on."""
        points = [(N, s) for N, s in zip(self.lengths, self.seconds[name], strict=True) if N >= FIT_FROM]
        return fitted_exponent(points)

    def crossovers(self) -> list[tuple[str, str, float | None]]:
        """(faster, slower, the length from which on) for the pairs that the ledger says something about."""
        chunk, loop, attention = self.seconds
        pairs = (loop, chunk), (loop, attention), (chunk, attention)
        return [(name, other, self.crossover(name, other)) for name, other in pairs]

    def crossover(self, name: str, other: str) -> float | None:
        """The length from which on `name` is faster than `other`, between two lengths on a straight line of logs.

        The first length if it always is, None if at the last it is not.
        """
        ratios = [math.log(a / b) for a, b in zip(self.seconds[name], self.seconds[other], strict=True)]
        if ratios[-1] >= 0:
            return None
        slower = max((i for i, ratio in enumerate(ratios) if ratio >= 0), default=None)
        if slower is None:
            return self.lengths[0]
        share = ratios[slower] / (ratios[slower] - ratios[slower + 1])
        return self.lengths[slower] * (self.lengths[slower + 1] / self.lengths[slower]) ** share


@dataclass(frozen=True)
class LevelResult:
    """One kernel of a level, or the backend at level 5: errors against the reference, and its time in bf16."""

    level: int
    name: str
    errors: dict[str, float]  # relative L2 by dtype, at ERROR_SHAPE
    seconds: float  # at TIME_SHAPE

    @property
    def ok(self) -> bool:
        return max(self.errors.values()) <= ERROR_LIMIT


def times(D: int, heads: int, device: torch.device, progress: Callable[[str], None]) -> Times:
    """Time level 1's kernels and causal attention over `LENGTHS`."""
    run, names = kernels.run, kernels.KERNELS[1]
    seconds: dict[str, list[float]] = {name: [] for name in (*names, ATTENTION)}
    for N in LENGTHS:
        progress(f"N {N}")
        q, k, v = torch.randn(3, 1, N, heads, D, dtype=torch.float16, device=device)
        for name in names:
            seconds[name].append(device_seconds(functools.partial(run, name, q, k, v), device))
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        attention = functools.partial(scaled_dot_product_attention, q, k, v, is_causal=True)
        seconds[ATTENTION].append(device_seconds(attention, device))
    return Times(LENGTHS, seconds)


def levels(D: int, wanted: Sequence[int], device: torch.device, progress: Callable[[str], None]) -> list[LevelResult]:
    """Errors and time of every kernel of the levels wanted."""
    found = []
    for level in wanted:
        for name, operator in _operators(level).items():
            progress(name)
            errors = {}
            for dtype in DTYPES:
                x = _on_device(arguments(level, inputs(**ERROR_SHAPE, K=D, V=D)), DTYPES[dtype], device)
                errors[dtype] = rel_rmse(operator(*x), FORMS[level][1](*x, CHUNK_SIZE))
            x = _on_device(arguments(level, inputs(**TIME_SHAPE, K=D, V=D)), torch.bfloat16, device)
            found.append(LevelResult(level, name, errors, device_seconds(functools.partial(operator, *x), device)))
    return found


def device_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median time of a call; on a GPU of a CUDA graph, since the host is slower than a kernel over a short length."""
    if device.type != "cuda":
        return median_seconds(call, device)
    return graph_seconds(call, device, steps=1)


def _operators(level: int) -> dict[str, Callable[..., Tensor]]:
    if level == 5:
        return {
            "kda.chunk_kda": lambda q, k, v, g, beta: kda.chunk_kda(q, k, v, g, beta, scale=1.0, backend="tilelang")[0]
        }
    return {name: functools.partial(kernels.run, name) for name in kernels.KERNELS[level]}


def _on_device(x: tuple[Tensor, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """q, k, v in dtype, gates and step sizes in fp32."""
    return tuple(t.to(device, dtype if i < 3 else torch.float32) for i, t in enumerate(x))
