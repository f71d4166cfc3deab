"""The ladder's pictures: work and, where measured, time against N; the error of the rounded state against the chunk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor

from .ledger import Ledger
from .rounding import Rounding
from .timing import FIT_FROM, Times

SMOOTH = 8  # chunks whose mean is one point: the noise of single chunks would hide the trend


def draw(ledgers: Sequence[Ledger], times: Times | None, rounding: Rounding, path: Path, title: str) -> None:
    """Write the panels side by side: FLOPs counted, times if there are any, errors of the state's rounding."""
    panels = 2 if times is None else 3
    figure, axes = plt.subplots(1, panels, figsize=(5.8 * panels, 5), squeeze=False, layout="constrained")
    figure.suptitle(title)
    _work(axes[0, 0], ledgers)
    if times is not None:
        _times(axes[0, 1], times)
    _errors(axes[0, -1], rounding)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _work(axes: Axes, ledgers: Sequence[Ledger]) -> None:
    N = [ledger.N for ledger in ledgers]
    axes.loglog(N, [x.attention_flops / 1e9 for x in ledgers], "^-", label="causal attention, 2 N² D")
    axes.loglog(N, [x.recomputed_flops / 1e9 for x in ledgers], "o-", label="prefix recomputed for every chunk, ∝ N²")
    axes.loglog(N, [x.linear_flops / 1e9 for x in ledgers], "s-", label="linear attention, 4 N D (D + BC)")
    axes.set(title=f"counted: D {ledgers[0].D}, BC {ledgers[0].BC}, one head", xlabel="N, tokens", ylabel="GFLOP")
    _finish(axes)


def _times(axes: Axes, times: Times) -> None:
    for (name, seconds), marker in zip(times.seconds.items(), "os^", strict=True):
        label = f"{name}: N^{times.exponent(name):.2f} from {FIT_FROM} on"
        axes.loglog(times.lengths, [s * 1e3 for s in seconds], f"{marker}-", label=label)
    axes.set(title="measured", xlabel="N, tokens", ylabel="ms")
    _finish(axes)


def _errors(axes: Axes, rounding: Rounding) -> None:
    chunk = _smooth(torch.arange(len(rounding.output), dtype=torch.float64))
    axes.loglog(chunk, _smooth(rounding.output), color="black", lw=1, label="output")
    if rounding.kernel_error is not None:
        axes.loglog(chunk, _smooth(rounding.kernel_error), "o-", ms=3, label="error of the kernel")
    axes.loglog(chunk, _smooth(rounding.state_error), "s-", ms=3, label="error by rounding the state alone")
    axes.loglog(chunk, _smooth(rounding.state_error / rounding.output), ":", label="the same, relative to the output")
    axes.set(title="state rounded to fp16: RMS of a chunk", xlabel="index of the chunk")
    _finish(axes)


def _smooth(x: Tensor) -> Tensor:
    """Means of runs of chunks, chunk 0 left out: it reads no state."""
    whole = (len(x) - 1) // SMOOTH * SMOOTH
    return x[1 : 1 + whole].unflatten(0, (-1, SMOOTH)).mean(1)


def _finish(axes: Axes) -> None:
    axes.grid(which="both", lw=0.2)
    axes.legend(fontsize=8)
