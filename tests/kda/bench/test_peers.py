"""Peers beside us: they get the same calls, and what they lack or break costs us nothing."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kda
from kda.bench.cases import CASES, FEW_HEADS, PEER_CASES, TRAINING
from kda.cli import main

Bench = Callable[..., tuple[int, dict[str, Any]]]

pytestmark = pytest.mark.usefixtures("one_thread", "plain_environment")


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


def test_a_missing_peer(bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    code, report = bench("T64", "--peers")
    assert code == 0 and "flash-linear-attention is not installed here" in capsys.readouterr().out
    assert [m["operator"] for m in report["measurements"]] == ["kda"]


def test_a_peer_that_cannot_be_imported(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Triton says so in its own way where there is no device."""

    def failing(name: str) -> None:
        raise RuntimeError("0 active drivers\nand more")

    monkeypatch.setattr("kda.bench.command.importlib", types.SimpleNamespace(import_module=failing))
    code, _ = bench("T64", "--peers")
    out = capsys.readouterr().out
    assert code == 0 and "cannot be used here; going on without it\nRuntimeError: 0 active drivers\nand more\n" in out


def test_a_peer_gets_the_same_call(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, ours = install_peer(monkeypatch), []
    monkeypatch.setattr(kda, "chunk_kda", lambda **arguments: ours.append(arguments))
    code, report = bench("H64-mixed", "--peers")
    assert code == 0 and [m["operator"] for m in report["measurements"]] == ["kda", "fla"]
    theirs, mine = calls[-1], ours[-1]
    assert theirs.pop("safe_gate") is True and mine.pop("backend") == "torch"
    assert theirs["lower_bound"] == -5.0 and theirs["state_v_first"] is True
    assert theirs.keys() == mine.keys() and all(theirs[name] is mine[name] for name in mine)


def test_a_peer_that_fails_costs_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    install_peer(monkeypatch, RuntimeError("no kernel"))
    code, report = bench("T64", "--peers")
    assert code == 0 and [m["error"] for m in report["measurements"]] == ["", "RuntimeError: no kernel"]


def test_a_peer_decodes_beside_us(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, ours = install_peer(monkeypatch), []
    monkeypatch.setattr(kda, "fused_recurrent_kda", lambda **arguments: ours.append(arguments))
    code, report = bench("B16x4", "--peers")
    assert code == 0 and [m["operator"] for m in report["measurements"]] == ["kda", "fla"]
    assert calls[-1]["q"] is ours[-1]["q"] and calls[-1]["q"].shape == (1, 4, 2, 128)


def test_peers_run_on_few_cases_unless_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_peer(monkeypatch)
    for operator in ("chunk_kda", "fused_recurrent_kda"):
        monkeypatch.setattr(kda, operator, lambda **arguments: None)
    file = tmp_path / "bench.json"
    assert main(["bench", "--device", "cpu", "--peers", "--json", str(file)]) == 0
    measured = json.loads(file.read_text())["measurements"]
    assert [m["case"] for m in measured if m["operator"] == "fla"] == [id for id in PEER_CASES if id not in TRAINING]
    assert [m["case"] for m in measured if m["operator"] == "kda"] == [
        id for id in CASES if id not in TRAINING + FEW_HEADS
    ]


def test_a_peer_trains_beside_us(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given step sizes, and their logits get a gradient through the sigmoid."""
    calls = install_peer(monkeypatch)

    def theirs(**arguments: Any) -> tuple[Tensor, None]:
        calls.append(arguments)
        assert torch.is_grad_enabled() and all(arguments[name].requires_grad for name in ("q", "beta", "A_log"))
        used = [arguments[name].float().sum() for name in ("q", "k", "g", "beta", "A_log", "dt_bias")]
        return arguments["v"] * sum(used), None

    sys.modules["fla.ops.kda"].chunk_kda = theirs
    code, report = bench("train-H32-mixed", "--peers")
    ours, fla = report["measurements"]
    assert code == 0 and (ours["operator"], fla["operator"]) == ("kda", "fla") and not fla["error"]
    assert all(fla[f"{name}seconds"] > 0 for name in ("", "forward_", "backward_"))
    call = calls[-1]
    assert call["safe_gate"] is True and call["lower_bound"] == -5.0 and call["cu_seqlens"].dtype == torch.int64
    assert call["use_qk_l2norm_in_kernel"] and call["use_gate_in_kernel"] and "use_beta_sigmoid_in_kernel" not in call
    assert ((call["beta"] > 0) & (call["beta"] < 1)).all() and call["initial_state"] is None


def test_a_peer_that_cannot_train_costs_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    install_peer(monkeypatch, RuntimeError("no kernel"))
    code, report = bench("train-H16", "--peers")
    assert code == 0 and [m["error"] for m in report["measurements"]] == ["", "RuntimeError: no kernel"]
