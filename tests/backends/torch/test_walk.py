"""What the torch backend costs: work and memory are linear in the number of tokens."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_calls import leaves, run

from kda.golden import inputs

pytestmark = pytest.mark.usefixtures("one_thread")


class Work(TorchDispatchMode):
    """Counts the elements that all operators put out, views apart."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.elements += sum(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))
        return out


@pytest.mark.parametrize("backward", [False, True])
def test_work_is_linear_in_T(backward: bool) -> None:
    def work(T: int) -> int:
        call = inputs.stable(1, T, 4, 16)
        if backward:
            call |= leaves(call, torch.float32)
        with Work() as counted:
            o, _ = run(call)
            if backward:
                o.sum().backward()
        return counted.elements

    assert work(16384) <= 2.02 * work(8192)


MEMORY = """
import sys
from pathlib import Path
import torch, kda
from kda.golden import inputs
torch.set_num_threads(1)
backward = sys.argv[1] == "backward"

def peak(T):
    call = inputs.stable(1, T, 2, 64, dtype=torch.float32)
    for name in ("q", "k", "v", "g", "beta"):
        call[name].requires_grad_(backward)
    o, _ = kda.chunk_kda(**call, backend="torch")
    if backward:
        o.sum().backward()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].removesuffix("kB"))

print(peak(64), peak(8192), peak(32768))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_peak_memory_is_linear_in_T(mode: str) -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY, mode], capture_output=True, text=True, check=True)
    base, once, four_times = map(int, done.stdout.split())
    assert four_times - base <= 4.4 * (once - base)
