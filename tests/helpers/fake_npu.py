"""A device `npu` without an NPU, for one process: fake_npu.cpp is torch's part, this file plays torch_npu and CANN.

PyPTO's launch is replaced by its interpreter, on the memory that the launch was given. What it is asked to launch is
noted in LAUNCHES. So this proves everything up to the launch, and nothing of what comes after it.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.machinery
import os
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

LIBRARY = "FAKE_NPU_LIBRARY"
"""Of the environment: where `library` has left the extension."""


def library(folder: Path) -> Path:
    """The extension, compiled into a folder. Skips the test where it cannot be."""
    from torch.utils import cpp_extension

    if (compiler := shutil.which("c++") or shutil.which("g++")) is None:
        pytest.skip("needs a C++ compiler")
    target = folder / "fake_npu.so"
    command = [compiler, "-std=c++20", "-O0", "-fPIC", "-shared", "-w", str(Path(__file__).with_suffix(".cpp")),
               *(f"-I{path}" for path in cpp_extension.include_paths()),
               *(f"-L{path}" for path in cpp_extension.library_paths()), "-lc10", "-ltorch_cpu",
               f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-o", str(target)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return target


@dataclass
class Launch:
    """What PyPTO was asked to launch."""

    config: Any
    options: dict[str, Any]
    device: int  # the current one
    stream: int
    tensors: list[Tensor]
    kernel: Any


LAUNCHES: list[Launch] = []


def launch(kernel: Any, stream: int, tensors: list[Tensor], definitions: object) -> None:
    """In place of PyPTO's own: the kernel on the tensors' memory, by the interpreter."""
    from kda.backends.pypto import build, interpret

    config = kernel.kwargs["config"]
    LAUNCHES.append(Launch(config, kernel._runtime_options, current(), stream, list(tensors), kernel))
    on_cpu = [torch.ops.fake_npu.on_cpu(tensor) for tensor in tensors]
    interpret.run(build._interpreted(kernel._original_func), on_cpu[:-2], on_cpu[-2:], config)


def current() -> int:
    """The index of this thread's current device."""
    return torch.ops.fake_npu.current()


def reads() -> int:
    """How many values and tensors have come from an NPU to the host."""
    return torch.ops.fake_npu.reads()


def install(cann: str = "9.0.0") -> None:
    """From now on this process has two NPUs, torch_npu, and a CANN of that release."""
    import pypto  # before CANN is there, whose runtime it would load
    from pypto.frontend.parser import entry

    from kda.backends import disk

    torch.ops.load_library(os.environ[LIBRARY])
    torch.utils.rename_privateuse1_backend("npu")
    torch.ops.fake_npu.set_up()
    npu = _torch_npu()
    torch._register_device_module("npu", npu)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch_npu = types.ModuleType("torch_npu")
    torch_npu.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    sys.modules |= {"torch.npu": npu, "torch_npu": torch_npu}

    home = disk.scratch() / "cann"
    (home / "x86_64-linux").mkdir(parents=True)
    (home / "x86_64-linux" / "ascend_toolkit_install.info").write_text(f"package_name=toolkit\nversion={cann}\n")
    os.environ["ASCEND_HOME_PATH"] = str(home)
    os.environ.pop("KDA_EMULATE", None)
    found = glob.glob
    glob.glob = lambda path, **options: ["/dev/davinci0"] if "davinci" in path else found(path, **options)
    pypto.pypto_impl.LaunchKernelTorch = entry.pypto_impl.LaunchKernelTorch = launch


class _Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return (end.at - self.at) * 1e3


def _torch_npu() -> types.ModuleType:
    """What torch_npu makes `torch.npu`, as far as torch and this package use it."""

    @contextlib.contextmanager
    def device(which: torch.device | int) -> Iterator[None]:
        before, index = current(), which if isinstance(which, int) else which.index
        torch.ops.fake_npu.set_current(before if index is None else index)
        try:
            yield
        finally:
            torch.ops.fake_npu.set_current(before)

    module = types.ModuleType("torch.npu")
    module.device = device
    module.current_device = current
    module.set_device = torch.ops.fake_npu.set_current
    module.current_stream = lambda: types.SimpleNamespace(npu_stream=0x1000 + current())
    module.is_available = lambda: True
    module.device_count = lambda: 2
    module.get_device_name = lambda index: "Ascend910B2 (a fake)"
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.synchronize = lambda *_: None
    module.Event = _Event
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    return module
