"""The ladder's command: its formulas against the published table, its report and pictures, with and without a GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import kda
from kda.cli import main
from kda.ladder import command, consistency, rounding, timing
from kda.ladder.consistency import FORMS, Check
from kda.ladder.ledger import Ledger
from kda.ladder.timing import ATTENTION, LevelResult, Times

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "N", 2048)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "missing", lambda D: ["there is no CUDA device"])


def ladder(tmp_path: Path, *arguments: str) -> tuple[int, dict]:
    file = tmp_path / "ladder.json"
    return main(["ladder", *arguments, "--json", str(file)]), json.loads(file.read_text())


@pytest.mark.parametrize(
    ("N", "chunks", "redundancy", "recomputed", "linear", "causal", "ratio", "linear_ratio"),
    [
        (512, 8, 3.5, 0.015, 0.017, 0.034, 0.438, 0.500),
        (2048, 32, 15.5, 0.260, 0.067, 0.537, 0.484, 0.125),
        (8192, 128, 63.5, 4.261, 0.268, 8.590, 0.496, 0.031),
        (16384, 256, 127.5, 17.113, 0.537, 34.360, 0.498, 0.016),
        (65536, 1024, 511.5, 274.609, 2.147, 549.756, 0.500, 0.004),
    ],
)
def test_ledger(N: int, chunks: int, redundancy: float, recomputed: float, linear: float, causal: float, ratio: float,
                linear_ratio: float) -> None:  # fmt: skip
    x = Ledger(N, 64, 64, 32, 32)
    assert (x.chunks, x.redundancy) == (chunks, redundancy)
    flops = [x.recomputed_flops, x.linear_flops, x.attention_flops]
    assert [round(y / 1e9, 3) for y in flops] == [recomputed, linear, causal]
    assert [round(x.recomputed_over_attention, 3), round(x.linear_over_attention, 3)] == [ratio, linear_ratio]
    assert x.linear_over_attention == 2 * (64 + 64) / N


def test_ledger_of_states() -> None:
    x = Ledger(32768, 128, 64, 32, 32)
    assert x.snapshot_bytes == 512 * 2**20 and (x.tiles, x.blocks, x.state_registers) == (4, 128, 32)
    assert Ledger(32768, 128, 64, 128, 32).state_registers == 128
    assert [Ledger(65536, 64, BC, 32, 1).recomputed_limit for BC in (32, 64, 128, 256)] == [1, 0.5, 0.25, 0.125]
    assert Ledger(65, 64, 64, 48, 1).chunks == 2 and Ledger(65, 64, 64, 48, 1).tiles == 2


@pytest.mark.usefixtures("no_gpu")
def test_a_run_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "ladder.png"
    code, report = ladder(tmp_path, "--N", "4096", "1024", "--D", "128", "--plot", str(picture))
    out = capsys.readouterr().out
    assert code == 0 and picture.read_bytes()[:4] == b"\x89PNG"
    assert [x["N"] for x in report["ledger"]] == [1024, 4096] and report["ledger"][1]["redundancy"] == 31.5
    assert len(report["checks"]) > 20 and all(check["ok"] for check in report["checks"])
    growth = report["rounding"]["growth"]
    assert growth["error by rounding the state"] == pytest.approx(0.5, abs=0.1)  # as sums of independent terms grow
    assert growth["the same over the output"] == pytest.approx(0.0, abs=0.1)
    assert report["rounding"]["state_error"][0] == 0.0 and len(report["rounding"]["output"]) == 32
    assert "Not measured" in out and report["not_measured_because"] == ["there is no CUDA device"]
    assert report["levels"] == [] and "times" not in report


@pytest.mark.usefixtures("no_gpu")
def test_one_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = ladder(tmp_path, "--level", "4")
    assert code == 0 and {check["level"] for check in report["checks"]} == {4} and "ledger" not in report
    assert "Ledger" not in capsys.readouterr().out


@pytest.mark.usefixtures("no_gpu")
def test_a_failed_check_is_exit_code_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "checks", lambda: [Check(2, "broken", 1e-3)])
    assert main(["ladder", "--level", "2"]) == 1 and "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plot", "x.pdf"], "--plot: expected a name that ends in .png"),
        (["--plot", "x.png", "--level", "3"], "--plot: draws level 1, got --level 3"),
        (["--json", "nowhere/x.json"], "--json: expected a file in a folder that exists"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ladder", *arguments]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"kda ladder: error: {message}") and not out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--N", "0"], "--N: expected at least 1, got 0"),
        (["--D", "9" * 400], "--D: expected at most 1099511627776, got 9"),
        (["--block-V", "-1"], "--block-V: expected at least 1, got -1"),
        (["--level", "6"], "--level: invalid choice"),
    ],
)
def test_numbers_out_of_range(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["ladder", *arguments])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


TIMES = Times((4096, 8192, 16384, 32768), {"chunk": [1, 4, 16, 64], "loop": [2, 4, 8, 16], "attention": [1, 2, 8, 32]})


def test_exponents_and_crossovers() -> None:
    assert [TIMES.exponent(name) for name in TIMES.seconds] == pytest.approx([2, 1, 2])
    assert TIMES.crossover("loop", "chunk") == pytest.approx(8192)
    assert TIMES.crossover("loop", "attention") == pytest.approx(16384)
    assert TIMES.crossover("chunk", "attention") is None  # slower at the last length
    assert TIMES.crossover("attention", "loop") is None
    between = Times((1024, 4096), {"a": [2.0, 1.0], "b": [1.0, 2.0]})
    assert between.crossover("a", "b") == pytest.approx(2048)
    assert Times((1024, 4096), {"a": [1.0, 1.0], "b": [2.0, 2.0]}).crossover("a", "b") == 1024


def install_kernels(monkeypatch: pytest.MonkeyPatch, factor: float = 1.0) -> None:
    """The CPU for a GPU, with the references for kernels and two short lengths."""

    def run(name: str, q: Tensor, k: Tensor, v: Tensor, *gate: Tensor) -> Tensor:
        level = next(level for level, names in names_of.items() if name in names)
        return (factor * FORMS[level][1](q, k, v, *gate, 64)).to(v.dtype)

    names_of = {1: ("linattn_chunk", "linattn_seq_in_loop"), 2: ("two",), 3: ("three",), 4: ("four",)}
    for module in (timing, command):
        monkeypatch.setattr(module, "kernels", SimpleNamespace(run=run, KERNELS=names_of))
    monkeypatch.setattr(timing, "missing", lambda D: [])
    monkeypatch.setattr(timing, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(timing, "LENGTHS", (64, 128))
    monkeypatch.setattr(timing, "FIT_FROM", 64)
    monkeypatch.setattr(timing, "ERROR_SHAPE", {"B": 1, "N": 70, "H": 1})
    monkeypatch.setattr(timing, "TIME_SHAPE", {"B": 1, "N": 64, "H": 1})
    operator = kda.chunk_kda
    monkeypatch.setattr(kda, "chunk_kda", lambda *x, scale, backend: operator(*x, scale=scale, backend="torch"))


def test_a_run_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install_kernels(monkeypatch)
    picture = tmp_path / "ladder.png"
    code, report = ladder(tmp_path, "--heads", "1", "--plot", str(picture))
    out = capsys.readouterr().out
    assert code == 0 and "Not measured" not in out and picture.read_bytes()[:4] == b"\x89PNG"
    assert [x["level"] for x in report["levels"]] == [1, 1, 2, 3, 4, 5]
    assert all(0 < error < 5e-3 for x in report["levels"] for error in x["errors"].values())
    assert set(report["times"]["seconds"]) == {"linattn_chunk", "linattn_seq_in_loop", ATTENTION}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in report["times"]["seconds"].values())
    assert set(report["times"]["exponents"]) == set(report["times"]["seconds"])
    assert math.isfinite(report["rounding"]["growth"]["error of the kernel"])


def test_a_kernel_that_is_off_is_exit_code_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_kernels(monkeypatch, factor=1.01)
    code, report = ladder(tmp_path, "--level", "3")
    assert code == 1 and "FAILED" in capsys.readouterr().out
    assert [x["ok"] for x in report["levels"]] == [False] and all(check["ok"] for check in report["checks"])


def test_what_a_gpu_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert timing.missing(64) == ["there is no CUDA device"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(kda.backends, "unusable", lambda name: [])
    reasons = timing.missing(96)
    assert "this one has (8, 0)" in reasons[0] and "--D 64 or 128, got 96" in reasons[1]


def test_inputs_are_those_of_the_seed() -> None:
    one, same, other = (consistency.inputs(1, 3, 1, 2, 4, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.g, same.g) and not torch.equal(one.g, other.g)
    assert one.unit_k.norm(dim=-1).allclose(torch.ones(1, dtype=torch.float64)) and one.g.max() <= 0


def test_a_run_that_is_ended_has_shown_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_kernels(monkeypatch)
    levels = timing.levels

    def interrupted(D: int, wanted: list[int], *others: object) -> list[LevelResult]:
        if wanted == [3]:
            raise KeyboardInterrupt
        return levels(D, wanted, *others)

    monkeypatch.setattr(timing, "levels", interrupted)
    assert main(["ladder", "--heads", "1"]) == 130
    out, err = capsys.readouterr()
    assert err == "kda ladder: interrupted\n"
    assert "references, fp64" in out and "Ledger of level 1" in out and "rounded to fp16" in out
    assert "linattn_seq_in_loop" in out and " two " in out and " three " not in out


def test_more_heads_than_the_memory_holds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install_kernels(monkeypatch)
    assert main(["ladder", "--heads", str(2**40)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("kda ladder: error: needs about ") and "take fewer --heads" in err and not out
