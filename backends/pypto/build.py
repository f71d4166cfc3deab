"""From a kernel body to something that runs: one body, traced for NPUs or for the interpreter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pypto
import torch
from torch import Tensor

from . import interpret
from .config import Config
from .program import tracing


def npu_options(config: Config) -> dict[str, dict[str, Any]]:
    """JIT options: how many iterations of the loops are in work at once, and how many alike tasks are merged into one.

    There was no NPU to time them on: they were chosen by PyPTO's cost model.
    """
    return {
        "runtime_options": {"run_mode": pypto.RunMode.NPU, "stitch_function_max_num": config.depth},
        "pass_options": {"cube_nbuffer_setting": {-1: 8}, "vec_nbuffer_setting": {-1: 8}},
    }


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
                _compiled(body, config)(*inputs, *outputs, config)


@functools.cache
def _compiled(body: Callable[..., None], config: Config) -> Callable[..., None]:
    """PyPTO keeps the configuration of the last call on this object and launches by it, so each has one of its own.

    It is asked for inside `tracing` alone, so that two threads do not build one twice.
    """
    return pypto.frontend.jit(**npu_options(config))(body)


@functools.cache
def _interpreted(body: Callable[..., None]) -> Callable[..., None]:
    return pypto.frontend.jit(**interpret.OPTIONS)(body)
