"""The picture of the gates: the error of o along tokens and channels, one row of panels a comparison.

An error is shown as a share of what its element is allowed, so that a comparison that passes stays below 1.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from torch import Tensor

from kda.gates.case import Finding, Result

MAX_ROWS = 40
MAX_BINS = 512
MAX_BORDERS = 24  # more of them would hide the picture
FLOOR, CEILING = 1e-5, 10.0


def draw(results: list[Result], path: Path, title: str) -> bool:
    """Write the picture: failed comparisons first, then one passing comparison per case, at most `MAX_ROWS`.

    False, and no picture, if no case left an error of o.
    """
    rows = [(r, f) for r in results for f in r.findings if f.error is not None and f.error.numel() and not f.ok]
    for result in results:
        rows += [(result, f) for f in result.findings if f.error is not None and f.error.numel() and f.ok][:1]
    if not rows:
        return False
    rows = rows[:MAX_ROWS]
    figure, axes = plt.subplots(len(rows), 2, figsize=(13, 2.1 * len(rows) + 0.8), squeeze=False,
                                width_ratios=(3, 2), layout="constrained")  # fmt: skip
    figure.suptitle(f"Error of o as a share of its limit, the largest over heads: {title}")
    for (result, finding), (image, curve) in zip(rows, axes, strict=False):
        _draw_row(result, finding, image, curve)
    for axis in axes[-1]:
        axis.set_xlabel("token")
    figure.savefig(path, dpi=80)
    plt.close(figure)
    return True


def _draw_row(result: Result, finding: Finding, image: Axes, curve: Axes) -> None:
    assert finding.error is not None
    error = finding.error.nan_to_num(torch.inf, torch.inf)
    T, V = error.shape
    binned = _bin(error).clamp(FLOOR, CEILING)
    shown = image.imshow(binned.T.numpy(), aspect="auto", origin="lower", extent=(0, T, 0, V), interpolation="nearest",
                         norm=LogNorm(FLOOR, CEILING), cmap="magma")  # fmt: skip
    image.figure.colorbar(shown, ax=image, pad=0.01, label="share")
    image.set_ylabel("channel")
    curve.set_ylabel("share")
    colour = "tab:green" if finding.ok else "tab:red"
    verdict = "passed" if finding.ok else "FAILED"
    image.set_title(f"{result.case.id}: {finding.what} {verdict}", fontsize=9, color=colour)
    per_token = _bin(error.amax(1, keepdim=True))[:, 0].clamp(FLOOR, CEILING)
    starts = torch.linspace(0, T, len(per_token) + 1)[:-1]
    curve.semilogy(starts.numpy(), per_token.numpy(), drawstyle="steps-post", color=colour, lw=0.9,
                   marker="." if len(per_token) == 1 else "")  # fmt: skip
    curve.axhline(1.0, color="black", lw=0.7, ls="--")
    curve.set_ylim(FLOOR, CEILING)
    curve.set_xlim(0, T)
    curve.set_title("the largest over channels, by token; dashed: the limit", fontsize=8)
    if len(finding.borders) <= MAX_BORDERS:
        for border in finding.borders:
            curve.axvline(border, color="grey", lw=0.3)
            image.axvline(border, color="white", lw=0.3)
    for axis in (image, curve):
        axis.tick_params(labelsize=7)


def _bin(error: Tensor) -> Tensor:
    """Maxima over at most MAX_BINS equal runs of tokens."""
    size = -(-error.shape[0] // MAX_BINS)
    padded = torch.nn.functional.pad(error, (0, 0, 0, -error.shape[0] % size))
    return padded.unflatten(0, (-1, size)).amax(1)
