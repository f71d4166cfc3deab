"""`python -m kda bench`: its exit codes, messages, report and table, on a CPU."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_backends import FakeBackend
from rich.console import Console
from torch import Tensor

import kda
from kda.bench import command
from kda.bench.cases import CASES, FEW_HEADS, TRAINING, Case
from kda.bench.measure import Ceilings, Measurement
from kda.cli import main

Bench = Callable[..., tuple[int, dict[str, Any]]]

pytestmark = pytest.mark.usefixtures("one_thread", "plain_environment")


def test_a_run_on_the_cpu(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "bench.png"
    code, report = bench("H32", "H64-mixed", "--plot", str(picture), "--dtype", "fp16")
    out = capsys.readouterr().out
    assert code == 0 and report["complete"] and "Scaled down for the CPU" in out and "T·H·(3K + 2V + 1)·b" in out
    assert report["scaled_down"] and report["backend"] == "torch" and report["dtype"] == "fp16"
    one, mixed = report["measurements"]
    assert (one["case"], one["H"], one["lengths"]) == ("H32", 2, [256]) and mixed["H"] == 4
    assert one["seconds"] > 0 and one["host_seconds"] is None and not one["error"]
    assert one["bytes_per_second"] == pytest.approx(one["bytes"] / one["seconds"])
    assert one["flops_per_second"] == pytest.approx(one["flops"] / one["seconds"])
    assert one["share_of_copy"] == pytest.approx(one["bytes_per_second"] / report["copy_bytes_per_second"])
    assert one["share_of_matmul"] == pytest.approx(one["flops_per_second"] / report["matmul_flops_per_second"])
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_without_cuda_the_cases_are_scaled_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "bench.json"
    assert main(["bench", "--case", "T64", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["scaled_down"] and report["measurements"][0]["lengths"] == [2]
    assert "Scaled down for the CPU" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_no_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cuda"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("kda bench: error: --device: cuda cannot be used: ") and not out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["H1"], "--case: unknown H1; known: H96"),
        (["T64", "--plot", "x.pdf"], "ends in .png"),
        (["T64", "--backend", "cuda"], "expected one of"),
        (["T64", "--backend", "fake"], "backend fake cannot be used: no card"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, register, capsys: pytest.CaptureFixture[str]) -> None:
    register("fake", FakeBackend()).missing.append("no card")
    assert main(["bench", "--device", "cpu", "--case", *arguments]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("kda bench: error: ") and message in err and not out


def test_a_backend_that_fails(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = kda.chunk_kda

    def refusing(q: Tensor, **others: object) -> object:
        if q.shape[1] == 2:
            raise NotImplementedError("two tokens")
        return real(q, **others)

    monkeypatch.setattr(kda, "chunk_kda", refusing)
    code, report = bench("T64", "T128", "--plot", str(tmp_path / "bench.png"))
    assert code == 1 and "T64, kda: NotImplementedError: two tokens" in capsys.readouterr().out
    assert [m["seconds"] is None for m in report["measurements"]] == [True, False]


def test_the_table_shows_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    measured = Measurement(CASES["H96"], "kda", 1e-3, 4e-5, 7e-6)
    command.show(Console(width=120), [measured], Ceilings(4.083326976e12, 700e12))
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "H96" in line]
    flops = CASES["H96"].flops
    assert row[:6] == ["H96", "kda", "96", "8192", "1.000", "25.0%"]
    assert row[6:9] == [f"{flops / 7e11:.1%}", "0.040", "0.007"]
    assert row[9:] == ["1021", f"{flops / 1e9:.4g}", "1020.8", f"{flops / 1e9:.2f}"]
    assert dataclasses.replace(measured, seconds=None).flops_per_second is None


def test_a_message_is_shown_whole(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"word{i}" for i in range(40)]

    def failing(**arguments: object) -> None:
        raise RuntimeError("the first line\n" + " ".join(words))

    monkeypatch.setattr(kda, "chunk_kda", failing)
    monkeypatch.setenv("COLUMNS", "80")
    code, _ = bench("T64", "train-H16")
    out = capsys.readouterr().out
    assert code == 1
    for id in ("T64", "train-H16"):
        message = out[out.index(f"{id}, kda: RuntimeError: the first line\n") :].splitlines()[1:]
        assert " ".join(message).split()[:40] == words and max(map(len, message[:3])) <= 80


def test_training_is_measured_forward_and_backward(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    code, report = bench("train-H32", "T64")
    out = capsys.readouterr().out
    assert code == 0 and "peak MB: the most memory" in out
    trained, other = report["measurements"]
    assert (trained["case"], trained["H"], trained["lengths"]) == ("train-H32", 2, [256])
    assert all(trained[f"{name}seconds"] > 0 for name in ("", "forward_", "backward_"))
    assert trained["peak_bytes"] is None and other["forward_seconds"] is other["backward_seconds"] is None
    assert trained["flops_per_second"] == pytest.approx(trained["flops"] / trained["seconds"])
    heads = [line.split() for line in out.splitlines() if line.startswith(" case")]
    assert len(heads) == 2 and "fwd+bwd" in heads[1] and "fwd+bwd" not in heads[0]


def test_the_table_of_training_shows_each_figure_and_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES["train-H96-T32768"]
    measured = Measurement(case, "kda", 10e-3, forward_seconds=2e-3, backward_seconds=8e-3, peak_bytes=12_300_000_000)
    best = Ceilings(4e12, 700e12)
    command.show(Console(width=160), [measured], best)
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(f" {case.id}")]
    assert row[:8] == [case.id, "kda", "96", "32768", "2.000", "8.000", "10.000", "12300"]
    assert row[8:10] == [f"{case.moved_bytes / 4e10:.1%}", f"{case.flops / 7e12:.1%}"]
    others = [Measurement(CASES["train-H32-mixed"], name, error="no kernel") for name in ("kda", "fla")]
    command.show(Console(width=80), [measured, *others], best)
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith(" train-")]
    assert rows[0].split() == row[:8] and [line.split()[0] for line in rows[1:]] == ["train-H32-mixed"] * 2
    assert max(map(len, rows)) <= 80 and "a wider terminal shows" in out


def test_training_and_few_heads_run_where_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def quick(case: Case, operator: str, *_: object, **__: object) -> Measurement:
        return Measurement(case, operator, 1.0)

    monkeypatch.setattr("kda.bench.measure.measure", quick)
    monkeypatch.setattr("kda.bench.measure.measure_training", quick)
    file = tmp_path / "bench.json"
    ran = {}
    for option in ((), ("--train",), ("--few-heads",)):
        assert main(["bench", "--device", "cpu", *option, "--json", str(file)]) == 0
        ran[option] = [m["case"] for m in json.loads(file.read_text())["measurements"]]
    assert ran["--train",] == list(TRAINING) and ran["--few-heads",] == list(FEW_HEADS)
    assert ran[()] == [id for id in CASES if id not in TRAINING + FEW_HEADS]


def test_a_run_that_is_ended_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = kda.chunk_kda

    def interrupted(q: Tensor, **others: object) -> object:
        if q.shape[1] == 4:
            raise KeyboardInterrupt
        return real(q, **others)

    monkeypatch.setattr(kda, "chunk_kda", interrupted)
    file = tmp_path / "bench.json"
    assert main(["bench", "--device", "cpu", "--json", str(file), "--case", "T64", "T128", "T256"]) == 130
    out, err = capsys.readouterr()
    assert err == "kda bench: interrupted\n"
    assert re.search(r"^T64 kda [\d.]+ ms$", out, re.MULTILINE), "a line as the case ends"
    assert re.search(r"^ T64 +kda +2 ", out, re.MULTILINE), "and a row of the table"
    report = json.loads(file.read_text())
    assert report["complete"] is False and [m["case"] for m in report["measurements"]] == ["T64"]
