"""The options that commands share: one spelling, one default, and one message each when something is wrong."""

from __future__ import annotations

import argparse
import os
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
        ("hpu", "--device: hpu cannot be used: "),
    ],
)
def test_a_device_that_cannot_be_used(name: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        options.device(parsed("--device", name))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_device_without_float64_cannot_run_the_golden(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Apple's: it is refused by name, and no default, though it is the accelerator of its machine."""
    zeros = torch.zeros

    def without_float64(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "mps" and dtype == torch.float64:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        return zeros(*size, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", without_float64)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *given: torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"^--device: mps cannot be used: Cannot convert a MPS Tensor to float64"):
        options.device(parsed("--device", "mps"))
    assert options.device(parsed()) == torch.device("cpu")
    for command in ("gate", "demo", "bench"):
        assert main([command, "--device", "mps"]) == 2


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


@pytest.mark.parametrize("command", ["gate", "bench", "ladder"])
def test_plot_needs_a_matplotlib_that_can_be_set_up(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPLBACKEND", "nosuch")
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    assert main([command, "--plot", str(tmp_path / "x.png")]) == 2
    err = capsys.readouterr().err
    assert "--plot: matplotlib cannot be imported: " in err and "nosuch" in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["info", "gate", "bench", "ladder", "demo"])
@pytest.mark.parametrize("name", ["KDA_EMULATE", "KDA_CHECK"])
def test_a_variable_that_cannot_be_read(
    command: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "maybe")
    assert main([command]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"kda {command}: error: {name}: expected one of 1, ") and err.endswith("got 'maybe'\n")
    assert not out and err.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_report_needs_a_folder_that_takes_files(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.touch()
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match=r"^--json: expected a file that can be written"):
        options.check_files(parsed("--json", str(file)))


def test_dtypes_are_spelled_alike() -> None:
    assert {name: options.DTYPES[parsed("--dtype", name).dtype] for name in ("bf16", "fp16", "fp32")} == {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
    }


def test_positive_numbers() -> None:
    assert options.positive_int("7") == 7
    assert options.positive_int(str(options.MOST)) == options.MOST
    with pytest.raises(argparse.ArgumentTypeError, match="expected at least 1, got 0"):
        options.positive_int("0")
    with pytest.raises(argparse.ArgumentTypeError, match=f"expected at most {options.MOST}, got {options.MOST + 1}"):
        options.positive_int(str(options.MOST + 1))
    with pytest.raises(ValueError):
        options.positive_int("many")
