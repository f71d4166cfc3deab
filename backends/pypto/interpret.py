"""Running a kernel on CPU tensors by PyPTO's interpreter of tensor graphs, which computes op by op in torch.

PyPTO has it to verify its compiler, so values come in and out by that way: the tensors of the call are handed over as
data to verify with, and each result that has a golden beside it is dumped to a file. What it proves: formulas, indices,
masks, tails, control flow. What it cannot see: memory sizes, layouts, synchronisation, the rounding of the hardware.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pypto
import torch
from pypto import pypto_impl
from pypto.frontend.parser import entry
from pypto.runtime import _pto_verify_datas
from torch import Tensor

from kda.backends import disk

from . import calculator
from .config import Config

OPTIONS = {
    "runtime_options": {"run_mode": pypto.RunMode.SIM},
    "verify_options": {"enable_pass_verify": True, "pass_verify_pass_filter": []},
    "host_options": {"compile_stage": pypto.CompStage.TENSOR_GRAPH},
}
"""JIT options: interpret the traced graph and stop there, before any compiler pass."""


def run(kernel: Callable[..., None], inputs: list[Tensor], outputs: list[Tensor], config: Config) -> None:
    """Call `kernel`, traced with OPTIONS, and leave its results in `outputs`.

    Raises RuntimeError where the interpreter leaves no result.
    """
    set_up()
    folder = Path(tempfile.mkdtemp(dir=disk.scratch()))
    before = os.environ.get("TILE_FWK_OUTPUT_DIR")
    os.environ["TILE_FWK_OUTPUT_DIR"] = str(folder)
    try:
        pypto.set_verify_golden_data(goldens=[*([None] * len(inputs)), *(torch.zeros_like(x) for x in outputs)])
        with torch.autocast("cpu", enabled=False):  # PyPTO's products are torch's, and would heed it
            kernel(*inputs, *outputs, config)
        for index, out in enumerate(outputs, len(inputs)):
            out.copy_(_dumped(folder, index, out))
    finally:
        _pto_verify_datas.reset()
        if before is None:
            del os.environ["TILE_FWK_OUTPUT_DIR"]
        else:
            os.environ["TILE_FWK_OUTPUT_DIR"] = before
    shutil.rmtree(folder)  # and not after an error: for the graphs of later ones, PyPTO goes on to use this folder


def set_up() -> None:
    """Let PyPTO compute on the values of CPU tensors, in this process."""
    calculator.load()
    entry.JitCallableWrapper._setup_verify_data = staticmethod(_hand_over)


def _hand_over(tensors: list[pypto.Tensor]) -> None:
    """In place of PyPTO's own way, which copies from an NPU and hands over zeros where there is none."""
    pypto_impl.SetVerifyData(entry._pto_to_tensor_data(tensors), [], _pto_verify_datas.get_data())


def _dumped(folder: Path, index: int, like: Tensor) -> Tensor:
    files = [f for f in folder.rglob(f"tensor_graph~{index}~*.data") if "golden" not in f.name]
    if len(files) != 1:
        raise RuntimeError(f"PyPTO's interpreter left {len(files)} results for argument {index}, expected 1")
    return torch.frombuffer(bytearray(files[0].read_bytes()), dtype=like.dtype).view(like.shape)
