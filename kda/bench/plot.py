"""The roofline picture: operations per byte against what was achieved, under the machine's two ceilings."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from kda.bench.cases import Decode
from kda.bench.measure import Ceilings, Measurement

GAP = 0.03  # between labels, as a part of the axis
MARKERS = "os^Dv"


def draw(measurements: list[Measurement], ceilings: Ceilings, path: Path, title: str) -> bool:
    """Write the picture of all measurements that have a time; False, and no picture, if none has.

    Labels stand beside the points, in order of speed.
    """
    points = [(m.case.flops / m.case.moved_bytes, r / 1e12, m) for m in measurements if (r := m.flops_per_second)]
    if not points:
        return False
    points.sort(key=lambda point: point[1])
    figure, axes = plt.subplots(figsize=(11, 7.5), layout="constrained")
    ridge = ceilings.matmul / ceilings.copy
    intensities = [x for x, _, _ in points] + [ridge]
    left, right = min(intensities) / 2, max(intensities) * 6
    x = np.geomspace(left, right, 300)
    axes.loglog(x, np.minimum(x * ceilings.copy, ceilings.matmul) / 1e12, color="black", lw=1.2)
    lowest = min([y for _, y, _ in points] + [ceilings.matmul / 1e14]) / 2
    highest = ceilings.matmul / 1e12 * 2
    _name_ceilings(axes, ceilings, left, right)
    axes.set_xlim(left, right)
    axes.set_ylim(lowest, highest)
    operators = list(dict.fromkeys(m.operator for m in measurements))
    for operator, marker in zip(operators, MARKERS, strict=False):
        own = [(x, y) for x, y, m in points if m.operator == operator]
        axes.plot(*zip(*own, strict=True) if own else ([], []), marker, ms=6, label=operator)
    axes.axvline(ridge, color="grey", lw=0.6, ls=":")
    for decode in (False, True):
        if group := [point for point in points if isinstance(point[2].case, Decode) == decode]:
            _label(axes, group, max(x for x, _, _ in group) * 1.6, lowest, highest)
    axes.set(xlabel="FLOP per byte of ideal traffic", ylabel="TFLOP/s achieved", title=title)
    axes.legend(loc="lower left")
    axes.grid(which="both", lw=0.2)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def _name_ceilings(axes: Axes, ceilings: Ceilings, left: float, right: float) -> None:
    matmul = f"matmul {ceilings.matmul / 1e12:.3g} TFLOP/s"
    axes.annotate(matmul, (right, ceilings.matmul / 1e12), (-4, 4), textcoords="offset points", ha="right")
    at = left * 1.2
    axes.annotate(f"copy {ceilings.copy / 1e9:.4g} GB/s", (at, at * ceilings.copy / 1e12), (10, -8),
                  textcoords="offset points")  # fmt: skip


def _label(axes: Axes, points: list[tuple[float, float, Measurement]], at: float, low: float, high: float) -> None:
    """Names in a column right of the points, each at its point's height as far as they do not touch."""
    span = math.log(high / low)
    heights: list[float] = []
    for _, y, _ in points:
        height = math.log(y / low) / span
        heights.append(max(height, heights[-1] + GAP) if heights else height)
    top = 0.9
    for i in reversed(range(len(heights))):  # what was pushed past the top comes down again
        heights[i] = min(heights[i], top)
        top = heights[i] - GAP
    for (x, y, m), height in zip(points, heights, strict=True):
        text = f"{m.case.id} {m.operator}: {(m.seconds or 0.0) * 1e3:.3g} ms"
        axes.annotate(text, (x, y), (at, low * math.exp(height * span)), fontsize=8, va="center",
                      arrowprops={"arrowstyle": "-", "lw": 0.4, "color": "grey", "relpos": (0, 0.5)})  # fmt: skip
