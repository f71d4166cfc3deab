"""The benchmark's clocks, with CUDA's replaced by some that are easy to read."""

from __future__ import annotations

import pytest
import torch

from kda.bench import measure

pytestmark = pytest.mark.usefixtures("one_thread", "plain_environment")


def test_host_time_is_taken_from_an_idle_device(monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("idle"))
    assert 0 <= measure.host_seconds(lambda: events.append("call"), torch.device("cuda")) < 1e-3
    assert measure.HOST_RUNS >= 100 and events == ["idle", "call"] * measure.HOST_RUNS


def test_the_device_time_is_the_median_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's clock replaced by one that each call moves: warm-up calls are slow and don't count."""
    clock = {"ms": 0.0, "calls": 0}

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock["ms"]

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    def call() -> None:
        clock["calls"] += 1
        clock["ms"] += 1000.0 if clock["calls"] <= measure.WARM_UP else 2.0 if clock["calls"] % 5 else 50.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert measure.median_seconds(call, torch.device("cuda")) == pytest.approx(2e-3)
    assert clock["calls"] == measure.WARM_UP + measure.RUNS and measure.RUNS >= 30


def test_the_peak_is_what_a_call_has_beyond_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's counters replaced by some that a call moves: an older peak does not count."""
    memory = {"now": 100, "peak": 900}

    def call() -> None:
        memory["peak"] = max(memory["peak"], memory["now"] + 70)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: memory.update(peak=memory["now"]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: memory["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: memory["peak"])
    assert measure.peak_bytes(call, torch.device("cuda")) == 70
    assert measure.peak_bytes(call, torch.device("cpu")) is None
