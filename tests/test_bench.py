"""The benchmark: its formulas against hand counts and real tensors, its exit codes, report and picture on a CPU."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kda
from kda.__main__ import main
from kda.bench import command, measure
from kda.bench.cases import CASES, HOST_CASE, MIXED, PEER_CASES, Case, Decode
from kda.bench.measure import Ceilings, Measurement

CPU = ["bench", "--device", "cpu", "--case"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KDA_BACKEND", raising=False)


def bench(tmp_path: Path, *arguments: str) -> tuple[int, dict]:
    file = tmp_path / "bench.json"
    return main([*CPU, *arguments, "--json", str(file)]), json.loads(file.read_text())


def test_the_table_of_cases() -> None:
    assert [CASES[id].H for id in ("H96", "H64", "H32", "H16")] == [96, 64, 32, 16]
    assert sum(MIXED) == 8192 and CASES["H64-mixed"].lengths == MIXED and CASES["H96-8x1024"].tokens == 8192
    assert {CASES[f"T{T}"].lengths[0] for T in (64, 128, 256, 512, 1024, 2048)} == {64, 128, 256, 512, 1024, 2048}
    assert set(PEER_CASES) <= set(CASES) and CASES[HOST_CASE].tokens == 64


def test_bytes_by_hand() -> None:
    # A token and head: five rows of 128 and one beta, 641 numbers of 2 bytes.
    # A head: states 2 · 128² · 4 B, A_log and dt_bias 129 · 4 B.
    assert CASES["T64"].moved_bytes == 32 * (64 * 1282 + 131072 + 516) == 6836352
    assert CASES["H96"].moved_bytes == 96 * (8192 * 1282 + 131072 + 516) == 1020838272
    assert CASES["H96-8x1024"].moved_bytes == CASES["H96"].moved_bytes + 7 * 96 * 131072 + 9 * 8


@pytest.mark.parametrize(
    "case",
    [Case("one", 3, (70,)), Case("packed", 2, (5, 64, 7)), Case("K", 2, (9,), 64, 32), Decode("B", 2, (4, 4, 4))],
)
def test_bytes_are_those_of_the_tensors(case: Case) -> None:
    inputs = case.inputs(torch.device("cpu"), torch.bfloat16)
    results = getattr(kda, case.operator)(**inputs)
    tensors = [x for x in (*inputs.values(), *results) if isinstance(x, Tensor)]
    assert case.moved_bytes == sum(x.nbytes for x in tensors)
    again = case.inputs(torch.device("cpu"), torch.bfloat16)
    assert all(torch.equal(inputs[name], again[name]) for name in ("q", "g", "initial_state", "A_log"))


def test_flops_by_hand() -> None:
    # A whole chunk: Akk, Aqk, w 3 · 2 · 64² · 128; u, Aqk v_new 2 · 2 · 64² · 128; three products of 2 · 64 · 128².
    chunk = 5 * 2 * 64 * 64 * 128 + 3 * 2 * 64 * 128 * 128 + 64**3 / 3
    assert CASES["T64"].flops == pytest.approx(32 * chunk)
    assert CASES["H96"].flops == pytest.approx(96 * 128 * chunk)
    assert CASES["B16x4"].flops == 16 * 4 * 32 * 7 * 128 * 128
    # A tail counts by its tokens; of one token: 10 · 128 + 6 · 128² + 1/3. Sequences don't share chunks.
    one = 10 * 128 + 6 * 128 * 128 + 1 / 3
    assert Case("", 1, (65,)).flops == pytest.approx(chunk + one)
    assert Case("", 2, (1, 64, 1)).flops == pytest.approx(2 * (chunk + 2 * one))


def test_scaled_down() -> None:
    assert CASES["H96-mixed"].scaled_down().lengths == (40, 17, 64, 30, 8, 95)
    assert CASES["B64x4"].scaled_down() == Decode("B64x4", 2, (4,) * 4)
    assert (CASES["H8-T65536"].scaled_down().H, CASES["T64"].scaled_down().lengths) == (1, (2,))


def test_a_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "bench.png"
    code, report = bench(tmp_path, "H32", "H64-mixed", "--plot", str(picture), "--dtype", "fp16")
    out = capsys.readouterr().out
    assert code == 0 and "Scaled down for the CPU" in out and "T·H·(3K + 2V + 1)·b" in out
    assert report["scaled_down"] and report["backend"] == "torch" and report["dtype"] == "fp16"
    one, mixed = report["measurements"]
    assert (one["case"], one["H"], one["lengths"]) == ("H32", 2, [256]) and mixed["H"] == 4
    assert one["seconds"] > 0 and one["host_seconds"] is None and not one["error"]
    assert one["bytes_per_second"] == pytest.approx(one["bytes"] / one["seconds"])
    assert one["flops_per_second"] == pytest.approx(one["flops"] / one["seconds"])
    assert one["share_of_copy"] == pytest.approx(one["bytes_per_second"] / report["copy_bytes_per_second"])
    assert one["share_of_matmul"] == pytest.approx(one["flops_per_second"] / report["matmul_flops_per_second"])
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_no_cuda(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench"]) == 2
    assert "no CUDA device here; --device cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["H1"], "unknown H1; known: H96"),
        (["T64", "--plot", "x.pdf"], "ends in .png"),
        (["T64", "--backend", "cuda"], "expected one of"),
        (["T64", "--backend", "pypto"], "backend pypto cannot be used: "),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CPU, *arguments]) == 2
    assert message in capsys.readouterr().out


def test_a_backend_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = kda.chunk_kda

    def refusing(q: Tensor, **others: object) -> object:
        if q.shape[1] == 2:
            raise NotImplementedError("two tokens")
        return real(q, **others)

    monkeypatch.setattr(kda, "chunk_kda", refusing)
    code, report = bench(tmp_path, "T64", "T128", "--plot", str(tmp_path / "bench.png"))
    assert code == 1 and "T64, kda: NotImplementedError: two tokens" in capsys.readouterr().out
    assert [m["seconds"] is None for m in report["measurements"]] == [True, False]


def test_a_missing_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    code, report = bench(tmp_path, "T64", "--peers")
    assert code == 0 and "flash-linear-attention is not installed here" in capsys.readouterr().out
    assert [m["operator"] for m in report["measurements"]] == ["kda"]


def install_peer(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> list[dict]:
    """Put a module in fla's place that notes its calls, or fails."""
    calls = []

    def operator(**arguments: object) -> None:
        calls.append(arguments)
        if error:
            raise error

    both = {"chunk_kda": operator, "fused_recurrent_kda": operator}
    for name, content in (("fla", {"__version__": "0"}), ("fla.ops", {}), ("fla.ops.kda", both)):
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_a_peer_gets_the_same_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, ours = install_peer(monkeypatch), []
    monkeypatch.setattr(kda, "chunk_kda", lambda **arguments: ours.append(arguments))
    code, report = bench(tmp_path, "H64-mixed", "--peers")
    assert code == 0 and [m["operator"] for m in report["measurements"]] == ["kda", "fla"]
    theirs, mine = calls[-1], ours[-1]
    assert theirs.pop("safe_gate") is True and mine.pop("backend") == "torch"
    assert theirs["lower_bound"] == -5.0 and theirs["state_v_first"] is True
    assert theirs.keys() == mine.keys() and all(theirs[name] is mine[name] for name in mine)


def test_a_peer_that_fails_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_peer(monkeypatch, RuntimeError("no kernel"))
    code, report = bench(tmp_path, "T64", "--peers")
    assert code == 0 and [m["error"] for m in report["measurements"]] == ["", "RuntimeError: no kernel"]


def test_a_peer_decodes_beside_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, ours = install_peer(monkeypatch), []
    monkeypatch.setattr(kda, "fused_recurrent_kda", lambda **arguments: ours.append(arguments))
    code, report = bench(tmp_path, "B16x4", "--peers")
    assert code == 0 and [m["operator"] for m in report["measurements"]] == ["kda", "fla"]
    assert calls[-1]["q"] is ours[-1]["q"] and calls[-1]["q"].shape == (1, 4, 2, 128)


def test_peers_run_on_few_cases_unless_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_peer(monkeypatch)
    for operator in ("chunk_kda", "fused_recurrent_kda"):
        monkeypatch.setattr(kda, operator, lambda **arguments: None)
    file = tmp_path / "bench.json"
    assert main(["bench", "--device", "cpu", "--peers", "--json", str(file)]) == 0
    measured = json.loads(file.read_text())["measurements"]
    assert [m["case"] for m in measured if m["operator"] == "fla"] == list(PEER_CASES)
    assert [m["case"] for m in measured if m["operator"] == "kda"] == list(CASES)


def test_host_time_is_taken_from_an_idle_device(monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("idle"))
    assert 0 <= measure.host_seconds(lambda: events.append("call")) < 1e-3
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


def test_the_table_shows_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    measured = Measurement(CASES["H96"], "kda", 1e-3, 4e-5, 7e-6)
    command._show(command.Console(width=120), [measured], Ceilings(4.083326976e12, 700e12))
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "H96" in line]
    flops = CASES["H96"].flops
    assert row[:8] == ["H96", "kda", "96", "8192", "1.000", "1020.8", "1021", "25.0%"]
    assert row[8:] == [f"{flops / 1e9:.2f}", f"{flops / 1e9:.4g}", f"{flops / 7e11:.1%}", "0.040", "0.007"]
    assert dataclasses.replace(measured, seconds=None).flops_per_second is None
