"""The picture of the gates: the error of o along tokens and channels, one row of panels a comparison."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LogNorm
from torch import Tensor

from kda.gates.case import O_LIMIT, Finding, Result
from kda.golden.constants import CHUNK_SIZE

MAX_ROWS = 40
MAX_BINS = 512
FLOOR = 1e-6


def draw(results: list[Result], path: Path, title: str) -> None:
    """Write the picture: failed comparisons first, then one passing comparison per case, at most `MAX_ROWS`."""
    rows = [(r, f) for r in results for f in r.findings if f.error is not None and f.error.numel() and not f.ok]
    for result in results:
        rows += [(result, f) for f in result.findings if f.error is not None and f.error.numel() and f.ok][:1]
    rows = rows[:MAX_ROWS]
    figure, axes = plt.subplots(max(1, len(rows)), 2, figsize=(13, 1.9 * max(1, len(rows)) + 0.8), squeeze=False,
                                width_ratios=(3, 2), layout="constrained")  # fmt: skip
    figure.suptitle(f"Largest |error| of o over heads: {title}")
    for (result, finding), (image, curve) in zip(rows, axes, strict=False):
        _draw_row(result, finding, image, curve)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _draw_row(result: Result, finding: Finding, image: plt.Axes, curve: plt.Axes) -> None:
    error = finding.error.nan_to_num(torch.inf, torch.inf)
    T, V = error.shape
    binned = _bin(error).clamp(FLOOR, 1.0)
    shown = image.imshow(binned.T, aspect="auto", origin="lower", extent=(0, T, 0, V), interpolation="nearest",
                         norm=LogNorm(FLOOR, 1.0), cmap="magma")  # fmt: skip
    image.figure.colorbar(shown, ax=image, pad=0.01)
    image.set_ylabel("channel")
    colour = "tab:green" if finding.ok else "tab:red"
    verdict = "passed" if finding.ok else "FAILED"
    image.set_title(f"{result.case.id}: {finding.what} {verdict}", fontsize=9, color=colour)
    per_token = _bin(error.amax(1, keepdim=True))[:, 0].clamp(FLOOR)
    starts = torch.linspace(0, T, len(per_token) + 1)[:-1]
    curve.semilogy(starts, per_token, drawstyle="steps-post", color=colour, lw=0.9)
    curve.axhline(O_LIMIT, color="black", lw=0.7, ls="--")
    curve.set_ylim(FLOOR, max(1.0, 2 * min(per_token.max().item(), 1e6)))
    curve.set_xlim(0, T)
    curve.set_title(f"by token; dashed: the limit at o = 0, {O_LIMIT:g}", fontsize=8)
    if T <= 20 * CHUNK_SIZE:  # more borders than that would hide the picture
        for border in range(CHUNK_SIZE, T, CHUNK_SIZE):
            curve.axvline(border, color="grey", lw=0.3)
            image.axvline(border, color="white", lw=0.3)
    for axis in (image, curve):
        axis.tick_params(labelsize=7)


def _bin(error: Tensor) -> Tensor:
    """Maxima over at most MAX_BINS equal runs of tokens."""
    size = -(-error.shape[0] // MAX_BINS)
    padded = torch.nn.functional.pad(error, (0, 0, 0, -error.shape[0] % size))
    return padded.unflatten(0, (-1, size)).amax(1)
