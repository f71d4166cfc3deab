"""In the dispatch of FLA 0.5 and 0.6: ours run where they take a call, and FLA's own with a reason elsewhere."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from calls import dense
from fake_backends import FakeBackend

import kda.fla
from kda.fla import dispatch

ROOT = Path(__file__).resolve().parents[3]
HELPERS = ROOT / "tests" / "helpers"
VERSIONS = ("fla_0_5", "fla_0_6")
OWN = "FLA's own"


@pytest.fixture(params=VERSIONS)
def flas(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`fla.ops.kda` of a stand-in for FLA, with our operators in its dispatch."""
    monkeypatch.syspath_prepend(HELPERS / request.param)
    monkeypatch.setattr(dispatch, "_logged", set())
    module = importlib.import_module("fla.ops.kda")
    assert module.chunk_kda() == OWN
    kda.fla.register()
    yield module
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        del sys.modules[name]


def test_ours_answer(flas: ModuleType) -> None:
    call = dense()
    for name in ("chunk_kda", "fused_recurrent_kda_fwd"):
        o, state = getattr(flas, name)(*call.values(), inplace_final_state=False, output_final_state=True)
        expected, expected_state = kda.chunk_kda(**call, output_final_state=True, state_v_first=False)
        torch.testing.assert_close(o, expected)
        torch.testing.assert_close(state, expected_state)
    assert torch.equal(flas.gate.fused_kda_gate(call["g"], lower_bound=-5.0), -5 * call["g"].sigmoid())
    assert flas.gate.kda_gate_fwd() == OWN  # a part that only FLA has


def test_gradients_pass_through(flas: ModuleType) -> None:
    call = dense()
    call["q"].requires_grad_()
    flas.chunk_kda(**call)[0].sum().backward()
    assert call["q"].grad.any()


@pytest.mark.parametrize("changes, reason", [
    ({"cp_context": object()}, "chunk_kda runs FLA's own kernels: `cp_context`: expected to be left out"),
    ({"use_gate_in_kernel": True, "lower_bound": -10.0}, "lower_bound: expected"),
    ({"chunk_size": 16}, "`chunk_size` must be either 32 or 64"),
])  # fmt: skip
def test_flas_own_run_and_the_reason_is_logged_once(
    flas: ModuleType, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], reason: str
) -> None:
    for _ in range(2):
        assert flas.chunk_kda(**dense(), **changes) == OWN
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("kda.fla", logging.WARNING) and reason in record.getMessage()


def test_a_fall_back_to_torch_is_flas_call(flas: ModuleType, register: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Where a device has kernels, a call that they refuse is FLA's; `auto` would have run torch."""
    backend = FakeBackend()
    backend.refusals = ["not on a Tuesday"]
    register("fake", backend, device_type="cpu")
    assert flas.chunk_kda(**dense()) == OWN
    assert flas.gate.fused_kda_gate(dense()["g"], lower_bound=-5.0) == OWN  # FLA has a kernel for it, and we have none
    assert "fake: not on a Tuesday" in caplog.text
    backend.refusals.clear()
    flas.chunk_kda(**dense())
    assert len(backend.calls) == 1


def test_a_backend_named_by_the_environment_decides(flas: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_BACKEND", "pypto")
    assert flas.chunk_kda(**dense()) == OWN


def test_flas_own_switch(flas: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLA_KDA_OPS", "0")
    assert flas.chunk_kda(**dense()) == OWN


def test_without_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ImportError):
        kda.fla.register()


@pytest.mark.parametrize("switch, ours", [("1", True), ("0", False), (None, False)])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_variable_alone_switches_it_on(tmp_path: Path, version: str, switch: str | None, ours: bool) -> None:
    """As installed, with the entry point that PyTorch calls; the program knows nothing of it."""
    metadata = tmp_path / "kda_ops-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kda-ops\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nkda_ops = kda_autoload:start\n")
    environment = {name: x for name, x in os.environ.items() if not name.startswith(("KDA_", "TORCH_DEVICE"))}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (tmp_path, ROOT, HELPERS, HELPERS / version)))
    if switch is not None:
        environment["KDA_FLA"] = switch
    program = (
        "import sys, torch; assert 'kda' not in sys.modules; from calls import dense;"
        "from fla.ops.kda import chunk_kda; print(chunk_kda(**dense())[0] != 'F', 'kda' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(ours), str(ours)]
