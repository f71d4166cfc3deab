"""The options that commands share: one spelling, one default, and one message each when something is wrong."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_backends import FakeBackend

from kda.cli import main, options
from kda.cli.options import UsageError

pytestmark = pytest.mark.usefixtures("plain_environment")


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_backend(parser)
    options.add_device(parser)
    options.add_dtype(parser, "of q", None)
    options.add_files(parser, "draw it")
    return parser.parse_args(arguments)


# ---- backends


def test_the_option_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options.backend(parsed()) == "auto"
    monkeypatch.setenv("KDA_BACKEND", "pypto")
    assert options.backend(parsed()) == "pypto"
    assert options.backend(parsed("--backend", "torch")) == "torch"


def test_an_unknown_backend_is_blamed_on_who_named_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = "expected one of auto, tilelang, pypto, torch, got"
    with pytest.raises(UsageError, match=f"^--backend: {known} 'nosuch'$"):
        options.backend(parsed("--backend", "nosuch"))
    monkeypatch.setenv("KDA_BACKEND", "other")
    with pytest.raises(UsageError, match=f"^KDA_BACKEND: {known} 'other'$"):
        options.backend(parsed())


def test_a_registered_backend_is_a_choice_like_any_other(register) -> None:
    register("fake", FakeBackend(), device_type="cpu")
    assert options.backend(parsed("--backend", "fake")) == "fake"
    assert options.usable_backend(parsed(), torch.device("cpu")) == "fake"


def test_a_usable_backend_is_one_that_can_run(register) -> None:
    assert options.usable_backend(parsed(), torch.device("cpu")) == "torch"
    fake = register("fake", FakeBackend())
    fake.missing += ["no card", "no driver"]
    with pytest.raises(UsageError, match=r"^backend fake cannot be used: no card; no driver$"):
        options.usable_backend(parsed("--backend", "fake"), torch.device("cpu"))


# ---- devices


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nosuch", "--device: expected the name of a device (cpu, cuda, cuda:1, npu), got 'nosuch'"),
        ("meta", "--device: expected a device that holds values, got meta"),
        ("cuda:99", "--device: cuda:99 cannot be used: "),
        ("mps", "--device: mps cannot be used: "),
    ],
)
def test_a_device_that_cannot_be_used(name: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        options.device(parsed("--device", name))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU, else the NPU that PyPTO's own variable names, else the CPU; with emulation always the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: True), raising=False)
    monkeypatch.delenv("TILE_FWK_DEVICE_ID", raising=False)
    with pytest.raises(UsageError, match="npu:0"):  # torch has no such device here
        options.device(parsed())
    monkeypatch.setenv("TILE_FWK_DEVICE_ID", "3")
    with pytest.raises(UsageError, match="npu:3"):
        options.device(parsed())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if not torch.cuda.device_count():
        with pytest.raises(UsageError, match="cuda cannot be used"):
            options.device(parsed())
    monkeypatch.setenv("KDA_EMULATE", "1")
    assert options.device(parsed()) == torch.device("cpu")
    monkeypatch.delenv("KDA_EMULATE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.npu, "is_available", lambda: False)
    assert options.device(parsed()) == torch.device("cpu")


# ---- files and numbers


@pytest.mark.parametrize("command", ["gate", "bench", "ladder"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "nowhere/x.json"], "--json: expected a file in a folder that exists, got nowhere/x.json"),
        (["--plot", "nowhere/x.png"], "--plot: expected a file in a folder that exists, got nowhere/x.png"),
        (["--json", "."], "--json: expected a file that can be written, got ."),
        (["--plot", "x.pdf"], "--plot: expected a name that ends in .png, got x.pdf"),
    ],
)
def test_files_that_cannot_be_written(
    command: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *arguments]) == 2
    assert capsys.readouterr().err == f"kda {command}: error: {message}\n"


@pytest.mark.parametrize("command", ["gate", "bench", "ladder"])
def test_plot_needs_matplotlib(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([command, "--plot", str(tmp_path / "x.png")]) == 2
    assert "--plot: needs matplotlib" in capsys.readouterr().err


def test_dtypes_are_spelled_alike() -> None:
    assert {name: options.DTYPES[parsed("--dtype", name).dtype] for name in ("bf16", "fp16", "fp32")} == {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
    }


def test_positive_numbers() -> None:
    assert options.positive_int("7") == 7
    with pytest.raises(argparse.ArgumentTypeError, match="expected at least 1, got 0"):
        options.positive_int("0")
    with pytest.raises(ValueError):
        options.positive_int("many")
