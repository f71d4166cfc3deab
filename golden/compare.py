"""The element-wise comparer: how far a tensor is from its reference, and where."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

WORST = 5
"""How many elements a report lists."""

BLOCK_ELEMENTS = 1 << 22
"""Elements compared at once, so that fp64 copies of large tensors are never whole in memory."""


@dataclass(frozen=True)
class Element:
    """One element that stands out."""

    index: tuple[int, ...]
    actual: float
    expected: float

    @property
    def error(self) -> float:
        return abs(self.actual - self.expected)


@dataclass(frozen=True)
class Comparison:
    """Outcome of `compare`. Statistics are over the elements that are finite on both sides."""

    ok: bool
    shape: tuple[int, ...]
    atol: float
    rtol: float
    max_rel_rmse: float | None
    bad: int  # elements out of tolerance, non-finite ones included
    max_diff: float
    mean_diff: float
    std_diff: float
    rel_rmse: float
    worst: tuple[Element, ...]  # out of tolerance first by |actual - expected|
    nonfinite: int  # NaN or infinite in `actual`, not so in `expected`
    first_nonfinite: tuple[Element, ...]

    @property
    def bad_share(self) -> float:
        """Share of the elements that is out of tolerance, 0 to 1."""
        return self.bad / max(1, math.prod(self.shape))

    def __str__(self) -> str:
        limit = "" if self.max_rel_rmse is None else f" (limit {self.max_rel_rmse:.1e})"
        lines = [
            f"{'ok' if self.ok else 'FAILED'}: {self.bad} of {math.prod(self.shape)} elements ({self.bad_share:.2%}) "
            f"out of tolerance, atol {self.atol:.1e} + rtol {self.rtol:.1e}, shape {list(self.shape)}",
            f"  |diff| max {self.max_diff:.3e} mean {self.mean_diff:.3e} std {self.std_diff:.3e}; "
            f"relative RMSE {self.rel_rmse:.3e}{limit}",
        ]
        if self.nonfinite:
            where = ", ".join(f"{list(e.index)} is {e.actual} for {e.expected:.6g}" for e in self.first_nonfinite)
            lines.append(f"  {self.nonfinite} non-finite where none is expected: {where}")
        if not self.ok:
            lines += [
                f"  worst at {list(e.index)}: {e.actual:.6g} for {e.expected:.6g}, off by {e.error:.3e}"
                for e in self.worst
            ]
        return "\n".join(lines)


def rel_rmse(actual: Tensor, expected: Tensor) -> float:
    """RMS of the difference over the RMS of `expected`; 0 if both are all zeros, inf if `expected` alone is."""
    _same_shape(actual, expected)
    error = torch.linalg.vector_norm(actual.double() - expected.to(actual.device).double()).item()
    return _ratio(error, torch.linalg.vector_norm(expected.double()).item())


def compare(
    actual: Tensor, expected: Tensor, *, atol: float, rtol: float, max_rel_rmse: float | None = None
) -> Comparison:
    """Hold `actual` against `expected`: every element to |diff| <= atol + rtol |expected|, all to `max_rel_rmse`.

    Same shape, any dtypes and devices; the arithmetic is fp64. Equal infinities match, and NaN matches NaN; any other
    non-finite element is out of tolerance. Raises ValueError when the shapes differ.
    """
    _same_shape(actual, expected)
    bad = nonfinite = finite = 0
    max_diff = total = squares = reference = 0.0
    candidates: list[tuple[float, int]] = []
    first: list[int] = []
    flat_a, flat_e = actual.detach().reshape(-1), expected.detach().reshape(-1)
    for at in range(0, flat_a.numel(), BLOCK_ELEMENTS):
        a = flat_a[at : at + BLOCK_ELEMENTS].double()
        e = flat_e[at : at + BLOCK_ELEMENTS].to(a.device).double()
        both = a.isfinite() & e.isfinite()
        same = (a == e) | (a.isnan() & e.isnan())
        diff = torch.where(both, (a - e).abs(), torch.where(same, 0.0, torch.inf))
        out = diff > atol + rtol * torch.where(both, e.abs(), 0.0)
        wrong = ~a.isfinite() & ~same
        bad, nonfinite, finite = bad + int(out.sum()), nonfinite + int(wrong.sum()), finite + int(both.sum())
        d = diff[both]
        max_diff = max(max_diff, d.max().item() if d.numel() else 0.0)
        total, squares = total + d.sum().item(), squares + d.square().sum().item()
        reference += e[both].square().sum().item()
        top = diff.topk(min(WORST, diff.numel()))
        candidates += [(x, at + i) for x, i in zip(top.values.tolist(), top.indices.tolist(), strict=True)]
        if len(first) < WORST:
            first += (wrong.nonzero()[: WORST - len(first), 0] + at).tolist()

    mean = total / max(1, finite)
    rmse = _ratio(math.sqrt(squares), math.sqrt(reference))

    def element(i: int) -> Element:
        index = tuple(int(x) for x in torch.unravel_index(torch.tensor(i, device="cpu"), actual.shape))
        return Element(index, flat_a[i].item(), flat_e[i].item())

    return Comparison(
        ok=bad == 0 and (max_rel_rmse is None or rmse <= max_rel_rmse),
        shape=tuple(actual.shape),
        atol=atol,
        rtol=rtol,
        max_rel_rmse=max_rel_rmse,
        bad=bad,
        max_diff=max_diff,
        mean_diff=mean,
        std_diff=math.sqrt(max(0.0, squares / max(1, finite) - mean * mean)),
        rel_rmse=rmse,
        worst=tuple(element(i) for _, i in sorted(candidates, key=lambda c: (-c[0], c[1]))[:WORST]),
        nonfinite=nonfinite,
        first_nonfinite=tuple(element(i) for i in first),
    )


def _same_shape(actual: Tensor, expected: Tensor) -> None:
    if actual.shape != expected.shape:
        raise ValueError(f"actual has shape {list(actual.shape)}, expected has {list(expected.shape)}")


def _ratio(error: float, reference: float) -> float:
    return error / reference if reference else (math.inf if error else 0.0)
