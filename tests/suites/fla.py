"""Runs flash-linear-attention's own tests of KDA, unchanged, on the operators of this package.

    python tests/suites/fla.py CHECKOUT [--dispatch] [--device cpu] [--largest 3e8] [options of pytest]

CHECKOUT is a clone of flash-linear-attention, whose packages (triton, einops) must be installed; nothing is fetched.
FLA's names are replaced by those of `kda.fla`, or with --dispatch, FLA's own functions are called, and its dispatch
chooses. Either way the file's cases that need an NVIDIA GPU by name, or FlashKDA, run too: on --device, with ours.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FILE = Path("tests", "ops", "test_kda.py")
REPLACED = {
    "fla.ops.kda": ("chunk_kda", "fused_recurrent_kda"),
    "fla.ops.kda.fused_recurrent": ("fused_recurrent_kda_fwd",),
    "fla.ops.kda.gate": ("fused_kda_gate",),
}


class OnDevice:
    """torch for a test module that names the device "cuda" itself."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, name: str) -> torch.device:
        return torch.device(self._device if name == "cuda" else name)


class Suite:
    """The pytest plugin: which cases run, on what, and who computed them."""

    def __init__(self, device: str, largest: float) -> None:
        self.device, self.largest = device, largest
        self.ran: Counter[str] = Counter()  # "operator on backend" or "gate" in the case at hand
        self.lines: list[str] = []
        self.left_out: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in list(items):
            item.module.torch = OnDevice(self.device)  # type: ignore[attr-defined]
            if item.name.startswith("test_flash_kda"):  # skipped for the lack of a package that ours stands in for
                item.own_markers = [mark for mark in item.own_markers if mark.name != "skipif"]
            if state_updates(item) > self.largest:
                items.remove(item)
                self.left_out.append(item.name)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.ran.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome == "skipped":
            who = ", ".join(f"{count} x {name}" for name, count in self.ran.items()) or "nothing of ours"
            self.lines.append(f"{report.outcome:8} {report.duration:6.1f} s  {report.nodeid.split('::')[-1]}: {who}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("who computed each case")
        for line in self.lines:
            terminalreporter.write_line(line)
        for name in self.left_out:
            terminalreporter.write_line(f"left out: {name} (larger than --largest {self.largest:g})")

    def watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, noting what it is and, where it chooses a backend, which."""

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.ran[f"{args[0].op} on {result}" if name == "select" else name] += 1
            return result

        return call


def state_updates(item: pytest.Item) -> float:
    """Tokens times heads times K V of a case, which is what its time and memory go by."""
    sizes: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    tokens = sizes["cu_seqlens"][-1] if "cu_seqlens" in sizes else sizes.get("B", 1) * sizes.get("T", 1)
    return float(tokens * sizes.get("HV", sizes.get("H", 1)) * sizes.get("D", 1) ** 2)


def prepare(device: str, dispatch: bool, suite: Suite) -> None:
    """Let FLA's modules, which must be importable, test ours on `device`."""
    import fla.utils

    import kda.fla

    fla.utils.device = device
    if device == "cpu":
        fla.utils.IS_NVIDIA = True  # else the file skips its decoding tests
    kda.backends.select = suite.watched("select", kda.backends.select)
    if dispatch:
        kda.fla.dispatch.fused_kda_gate = suite.watched("fused_kda_gate", kda.fla.fused_kda_gate)
        kda.fla.register()
        return
    for module_name, functions in REPLACED.items():
        module: ModuleType = sys.modules[module_name]
        for name in functions:
            ours = getattr(kda.fla, name)
            setattr(module, name, suite.watched(name, ours) if name == "fused_kda_gate" else ours)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a clone of flash-linear-attention")
    parser.add_argument("--dispatch", action="store_true", help="go through FLA's own dispatch, and replace no name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--largest", type=float, default=float("inf"), help="leave out cases of more state updates")
    options, rest = parser.parse_known_args()
    file = options.checkout.resolve() / FILE
    if not file.exists():
        parser.error(f"{options.checkout}: expected a clone of flash-linear-attention with {FILE}, found none")
    sys.path.insert(0, str(options.checkout.resolve()))
    try:
        import fla.ops.kda  # noqa: F401
    except ImportError as error:
        parser.error(f"flash-linear-attention cannot be imported: {error}")
    suite = Suite(options.device, options.largest)
    prepare(options.device, options.dispatch, suite)
    alone = ["-c", "/dev/null", "--rootdir", str(file.parent), "--noconftest", "-p", "no:cacheprovider", "-q"]
    return int(pytest.main([*alone, str(file), *rest], plugins=[suite]))


if __name__ == "__main__":
    sys.exit(main())
