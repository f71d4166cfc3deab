"""Clocks: the median time of a call, the host's share of it, and what the machine can do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kda.backends.call import DIFFERENTIABLE
from kda.bench.cases import Case, Train

WARM_UP, RUNS, HOST_RUNS = 10, 50, 200
STEPS = 20
"""Calls in the CUDA graph whose replay is timed."""
CPU_RUNS = 3


@dataclass(frozen=True)
class Ceilings:
    """What this machine was measured to do."""

    copy: float  # bytes/s, read plus written, of a large copy inside the device's memory
    matmul: float  # FLOP/s of a large square product in the dtype of the cases


@dataclass(frozen=True)
class Measurement:
    """One operator on one case; `error` says why there is no time."""

    case: Case
    operator: str
    seconds: float | None = None  # median
    host_seconds: float | None = None  # median, until the call returns
    graph_seconds: float | None = None  # median, as one of many calls in a CUDA graph
    forward_seconds: float | None = None  # of training, where `seconds` is of both passes
    backward_seconds: float | None = None
    peak_bytes: int | None = None  # of memory in both passes, beyond the inputs
    error: str = ""

    @property
    def bytes_per_second(self) -> float | None:
        return self.seconds and self.case.moved_bytes / self.seconds

    @property
    def flops_per_second(self) -> float | None:
        return self.seconds and self.case.flops / self.seconds


def measure(
    case: Case, operator: str, call: Callable[[], object], device: torch.device, *, host: bool, graph: bool
) -> Measurement:
    """Time a call, its host time and its share of a CUDA graph too if asked for; an operator that refuses or fails
    makes a measurement that says so."""
    try:
        with torch.no_grad():
            seconds = median_seconds(call, device)
            in_graph = graph_seconds(call, device) if graph else None
            in_host = host_seconds(call, device) if host else None
            return Measurement(case, operator, seconds, in_host, in_graph)
    except Exception as error:  # one operator's failure must not cost the other rows
        return Measurement(case, operator, error=f"{type(error).__name__}: {error}")


def measure_training(
    case: Train, operator: str, forward: Callable[..., tuple[Any, ...]], inputs: dict[str, Any], device: torch.device
) -> Measurement:
    """Time the forward pass, with what autograd does there, the backward pass, and the two in turn; and their memory.

    `forward(**inputs)` returns o first. As `measure`, if it refuses or fails.
    """
    try:
        leaves = [inputs[name] for name in DIFFERENTIABLE if inputs[name] is not None]
        d_o = torch.randn_like(inputs["v"])

        def backward(o: Tensor, *, again: bool) -> tuple[Tensor, ...]:
            return torch.autograd.grad(o, leaves, d_o, retain_graph=again)

        def step() -> None:
            backward(forward(**inputs)[0], again=False)

        both = median_seconds(step, device)
        peak = peak_bytes(step, device)
        forward_seconds = median_seconds(lambda: forward(**inputs), device)
        o = forward(**inputs)[0]
        backward_seconds = median_seconds(lambda: backward(o, again=True), device)
    except Exception as error:
        return Measurement(case, operator, error=f"{type(error).__name__}: {error}")
    return Measurement(
        case, operator, both,
        forward_seconds=forward_seconds, backward_seconds=backward_seconds, peak_bytes=peak,
    )  # fmt: skip


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """The most memory that a call has beyond what is allocated when it begins; None where torch does not count it."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median of `RUNS` calls after `WARM_UP`, between the device's events; on a CPU, of `CPU_RUNS` after one.

    Every call has its own pair of events, and the host waits only once, at the end. Caches stay as the call before left
    them, so inputs that fit into L2 are read from there.
    """
    if device.type == "cpu":
        call()
        return statistics.median(_timed(call) for _ in range(CPU_RUNS))
    of_device = torch.get_device_module(device)
    for _ in range(WARM_UP):
        call()
    of_device.synchronize(device)
    pairs = [(of_device.Event(enable_timing=True), of_device.Event(enable_timing=True)) for _ in range(RUNS)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    of_device.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e-3


def host_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median time until a call returns, of `HOST_RUNS`. The device is idle at each start: no queue makes it wait."""
    times = []
    for _ in range(HOST_RUNS):
        torch.get_device_module(device).synchronize(device)
        times.append(_timed(call))
    return statistics.median(times)


def graph_seconds(call: Callable[[], object], device: torch.device, steps: int = STEPS) -> float:
    """Median time of one of `steps` calls that a CUDA graph replays: what a call takes without the host's share."""
    call()  # what is built at a first call cannot be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(steps):
            call()
    return median_seconds(graph.replay, device) / steps


def ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure the copy bandwidth (1 GiB) and the matmul rate (8192³); smaller ones on a CPU."""
    size, n = (2**30, 8192) if device.type != "cpu" else (2**26, 256)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * size / median_seconds(lambda: target.copy_(source), device)
    a, b = torch.randn(2, n, n, dtype=dtype, device=device)  # not zeros, which would draw less power
    out = torch.empty_like(a)
    return Ceilings(copy, 2 * n**3 / median_seconds(lambda: torch.mm(a, b, out=out), device))


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
