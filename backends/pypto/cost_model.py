"""A call in PyPTO's cost model: what its compiler makes of the kernel for an NPU, and the cycles that it expects."""

from __future__ import annotations

import collections
import csv
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kda.backends.call import KdaCall

from .config import Config
from .kernels.constants import CHUNK

STAGES = {
    "activation.py": "M1 activation", "chunk.py": "M1 cumsum", "scores.py": "M2 scores", "block_scores.py": "M2 scores",
    "inverse.py": "M2 inverse", "wy.py": "M3 wy", "carry.py": "M4 carry", "tiles.py": "blocks of tables and decays",
    "rows.py": "load and store", "recurrent.py": "recurrence",
}  # fmt: skip
"""File of the kernels -> what an operation that stands there is part of. Tasks that are alike are compiled once, and
all of them count for the stage of the first."""

CORES, HERTZ, BANDWIDTH = 24, 1.8e9, 1.6e12
"""Of an Ascend 910B2: cube cores, their clock, and bytes a second to and from its memory."""

CUBE = {"products_16": 4096, "products_32": 1024}
"""Multiplications a cycle of one cube core: fp32 takes four times as long as 16 bits, by public measurements."""

_LEAF = 3  # the type of program.json's functions that are tasks
_BITS = {6: 16, 7: 32, 8: 16}  # PyPTO's numbers of fp16, fp32 and bf16
_BYTES = {1: 1, 2: 2, 3: 4, 4: 8, 6: 2, 7: 4, 8: 2, 11: 1, 12: 2, 13: 4, 14: 8, 15: 1}  # of its types by number


@dataclass
class Counts:
    """What a call does, or a part of it."""

    matmuls: int = 0
    products_16: int = 0  # multiplications in the cube, of 16-bit operands
    products_32: int = 0  # and of fp32
    vector_ops: int = 0
    copies: int = 0
    read: int = 0  # bytes from global memory
    written: int = 0

    def __add__(self, other: Counts) -> Counts:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Counts(*(a + b for a, b in pairs))


@dataclass(frozen=True)
class Model:
    """A call in the model."""

    about: ClassVar[str] = (
        "PyPTO compiles the kernel with the options that NPUs get, and its scheduler runs on this machine, on 24 cube "
        "and 48 vector cores that take as long for each operation as a table of PyPTO's says. Nothing is computed, and "
        "no NPU takes part. Products, bytes, tasks and workspace are counted from what was compiled. The cycles are an "
        "estimate: the table is of single operations, nothing overlaps within a core, nothing limits the bandwidth of "
        "the memory, and a product in fp32 counts as two in 16 bits, where it takes as long as four."
    )

    cycles: int  # of the whole call, by the table
    tasks: int
    units: int  # what it has much of: chunks times heads, or tokens times heads in fused_recurrent_kda
    workspace: int  # bytes
    stages: dict[str, Counts]

    @property
    def total(self) -> Counts:
        return sum(self.stages.values(), Counts())

    @property
    def seconds(self) -> float:
        return self.cycles / HERTZ

    @property
    def cube_seconds(self) -> float:
        """No NPU of CORES cores can be faster, for its products."""
        return sum(getattr(self.total, name) / rate for name, rate in CUBE.items()) / CORES / HERTZ

    @property
    def memory_seconds(self) -> float:
        """What its traffic takes if nothing stays in the NPU's L2 cache."""
        return (self.total.read + self.total.written) / BANDWIDTH


def model(call: KdaCall) -> Model:
    """The model of a call on CPU tensors, made in a process of its own. Raises RuntimeError where PyPTO fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(dataclasses.replace(call, memo={}), folder / "call.pt")
        environment = {name: value for name, value in os.environ.items() if name != "ASCEND_HOME_PATH"} | {
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # with neither CANN nor torch_npu, as on any machine
            "TILE_FWK_OUTPUT_DIR": name, "OMP_NUM_THREADS": "1",
            "ASCEND_GLOBAL_LOG_LEVEL": "3", "ASCEND_SLOG_PRINT_TO_STDOUT": "1",
            "ASCEND_MODULE_LOG_LEVEL": "MACHINE=1",  # which says how large the workspace is
        }  # fmt: skip
        code = f"from kda.backends.pypto import cost_model; cost_model.simulate({str(folder / 'call.pt')!r})"
        with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT) as process:  # fmt: skip
            assert process.stdout is not None
            workspace, last = 0, collections.deque[bytes](maxlen=20)
            for line in process.stdout:  # too many of them to be kept
                last.append(line)
                if found := re.search(rb"workspaceSize=(\d+)", line):
                    workspace = max(workspace, int(found[1]))
        if (code_of_end := process.returncode) < 0:
            raise RuntimeError(f"PyPTO's scheduler ended with {signal.Signals(-code_of_end).name}")
        if code_of_end:
            raise RuntimeError(f"PyPTO's cost model failed: {b''.join(last).decode(errors='replace')}")
        (output,) = folder.glob("output*")
        report = (output / "CostModelSimulationOutput" / "_simulate.stat.report.txt").read_text()
        cycles = re.search(r"Total Cycles\D+(\d+)", report)
        assert cycles is not None, "PyPTO's report has no cycles"
        tasks, stages = _counted(output)
        units = call.HV * (_chunks(call) if call.op == "chunk_kda" else call.B * call.T)
        return Model(int(cycles[1]), tasks, units, workspace, stages)


def simulate(file: str) -> None:
    """Run the call in `file` in the cost model; this process is for nothing else."""
    import pypto

    from . import build, chunk, recurrent

    def run(body: Callable[..., None], inputs: list[Tensor], outputs: list[Tensor], config: Config) -> None:
        options = build.npu_options(config)
        options["runtime_options"]["run_mode"] = pypto.RunMode.SIM
        pypto.frontend.jit(**options)(body)(*inputs, *outputs, config)

    for host in (chunk, recurrent):
        vars(host)["run"] = run
    call: KdaCall = torch.load(file, weights_only=False)
    (chunk.chunk_kda if call.op == "chunk_kda" else recurrent.fused_recurrent_kda)(call)


def _chunks(call: KdaCall) -> int:
    lengths = [call.T] * call.B if call.cu_seqlens is None else call.cu_seqlens.diff().tolist()
    return sum(-(-length // CHUNK) for length in lengths)


def _counted(output: Path) -> tuple[int, dict[str, Counts]]:
    """The number of tasks, and what they do by stage."""
    with (output / "dyn_topo.txt").open() as file:
        runs = collections.Counter(row["leafHash"] for row in csv.DictReader(file))
    functions = json.loads((output / "program.json").read_text())["functions"]
    leaves = {function["hash"]: function for function in functions if function["graphtype"] == _LEAF}
    stages: collections.defaultdict[str, Counts] = collections.defaultdict(Counts)
    tasks = 0
    for hash, times in runs.items():
        if str(hash) in leaves:
            tasks += times
            for stage, counts in _of_a_task(leaves[str(hash)], times):
                stages[stage] += counts
    return tasks, dict(stages)


def _of_a_task(function: dict[str, Any], times: int) -> list[tuple[str, Counts]]:
    tensors = {tensor["magic"]: tensor for tensor in function["tensors"]}
    types = {tensor["rawmagic"]: tensor["datatype"] for tensor in function["rawtensors"]}
    found = []
    for operation in function["operations"]:
        ins, outs = ([tensors[i] for i in operation[side]] for side in ("ioperands", "ooperands"))
        name = operation["opcode"]
        counts = None
        if name.startswith("A_MUL"):
            rows, columns = outs[0]["shape"][-2:]
            products = math.prod(ins[0]["shape"]) // rows * rows * columns
            bits = _BITS[types[ins[0]["rawtensor"]]]
            counts = Counts(matmuls=times, **{f"products_{bits}": times * products})
        elif "COPY_IN" in name or "COPY_OUT" in name:
            moved, key = (outs[0], "read") if "COPY_IN" in name else (ins[0], "written")
            size = math.prod(moved["shape"]) * _BYTES[types[moved["rawtensor"]]]
            counts = Counts(copies=times, **{key: times * size})
        elif (ins or outs) and not name.startswith("L1_TO_") and name not in ("VIEW", "RESHAPE", "ASSEMBLE"):
            counts = Counts(vector_ops=times)
        if counts:
            found.append((STAGES.get(Path(operation.get("file", "")).name, "added by the compiler"), counts))
    return found
