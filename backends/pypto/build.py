"""From a kernel body to something that runs: one body, traced for NPUs or for the interpreter."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pypto
import torch
from torch import Tensor

from . import interpret
from .config import Config
from .program import tracing

NPU_OPTIONS = {
    "runtime_options": {"run_mode": pypto.RunMode.NPU, "stitch_function_max_num": 256},
    "pass_options": {"cube_nbuffer_setting": {-1: 8}, "vec_nbuffer_setting": {-1: 8}},
}
"""JIT options: how many iterations of the loops are in work at once, and how many alike tasks are merged into one.

There was no NPU to time them on. By PyPTO's cost model 16 heads of 384 tokens need 0.79 million cycles with them, 2.06
million without; larger numbers gain nothing there."""


def run(body: Callable[..., None], inputs: list[Tensor], outputs: list[Tensor], config: Config) -> None:
    """Run `body` on contiguous tensors of one device; it writes to `outputs` and may read them.

    Raises RuntimeError where PyPTO fails.
    """
    device = inputs[0].device
    with tracing(body.__name__):
        if device.type == "cpu":
            interpret.run(_interpreted(body), inputs, outputs, config)
        else:
            # PyPTO launches on the current device's stream.
            with torch.npu.device(device):  # type: ignore[attr-defined]  # torch_npu adds it
                _compiled(body)(*inputs, *outputs, config)


@functools.cache
def _compiled(body: Callable[..., None]) -> Callable[..., None]:
    return pypto.frontend.jit(**NPU_OPTIONS)(body)


@functools.cache
def _interpreted(body: Callable[..., None]) -> Callable[..., None]:
    return pypto.frontend.jit(**interpret.OPTIONS)(body)
