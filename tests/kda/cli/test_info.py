"""`python -m kda info`: every version, device, variable and backend, and what auto takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_backends import FakeBackend, WithoutBackward

from kda import backends
from kda.backends.disk import Cache
from kda.cli import info, main

pytestmark = pytest.mark.usefixtures("plain_environment")


def test_info_lists_everything(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KDA_BACKEND", "torch")
    monkeypatch.setattr(backends, "status", lambda: {"tilelang": ["no card", "no [driver]"], "pypto": [], "torch": []})
    assert main(["info"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"torch {torch.__version__}" in lines
    assert any(line.startswith("tilelang not usable here no card; no [driver]") for line in lines)
    assert "pypto usable here" in lines
    assert any(line.startswith("KDA_BACKEND torch ") for line in lines)
    assert any(line.startswith("KDA_EMULATE (unset) ") for line in lines)
    assert any(line.startswith("cpu ") for line in lines)


def test_auto_falls_to_torch_where_the_devices_backend_cannot_run() -> None:
    assert info.auto_choice("cuda", {"tilelang": [], "torch": []}) == "tilelang"
    assert info.auto_choice("cuda", {"tilelang": ["no card"], "torch": []}) == "torch"
    assert info.auto_choice("cpu", {"tilelang": [], "torch": []}) == "torch"


def test_info_tells_of_a_registered_backend(register, capsys: pytest.CaptureFixture[str]) -> None:
    register("fake", FakeBackend(), device_type="cpu").missing.append("no card")
    assert info.auto_choice("cpu", backends.status()) == "torch"
    assert main(["info"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "fake not usable here no card" in lines and "fake made for a test" in lines


def test_info_tells_what_a_backend_keeps_on_disk(register, tmp_path: Path) -> None:
    fake = register("fake", FakeBackend())
    assert "fake" not in [name for name, *_ in info.caches()]
    fake.cache = lambda: Cache(tmp_path, "FAKE_CACHE", 3, 5 * 2**20)
    assert ("fake", "3 files, 5.0 MiB", f"{tmp_path} (FAKE_CACHE)") in info.caches()


def test_info_tells_who_computes_gradients(
    register, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # each backend on a line
    fake = register("fake", WithoutBackward())
    assert info.gradients("fake") == [f"{op}: the backend torch, anew" for op in ("chunk_kda", "fused_recurrent_kda")]
    fake.fused_recurrent_kda_backward = lambda *_: {}
    assert info.gradients("fake")[1] == "fused_recurrent_kda: a backward pass of its own"
    assert main(["info"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "tilelang chunk_kda: a backward pass of its own fused_recurrent_kda: the backend torch, anew" in lines
    assert "torch autograd, from its operations" in lines
