"""All of PyPTO's compiler passes on the kernels, with the interpreter after each: it must compute what it did before.

The compiler does not raise where a pass changes a result, it leaves reports; they are read once the process has ended.
Each control breaks something on purpose and must turn the reports red.
"""

from __future__ import annotations

import collections
import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kda
from kda import golden
from kda.backends.pypto.config import Config
from kda.backends.pypto.detect import missing_interpreter, missing_pypto

PASSES = 36  # of PyPTO 0.2.0
CALLS = {
    # name: (operator, tokens, rows that a pass leaves: what every path of the kernel wrote, each time it ran)
    "chunk": ("chunk_kda", 600, 6),  # five chunks: four by the unrolled path, one that is cut short by the other
    "chunk, bounded": ("chunk_kda", 600, 6),
    "chunk, K first": ("chunk_kda", 200, 6),
    "recurrent": ("fused_recurrent_kda", 3, 8),
    "recurrent, one token": ("fused_recurrent_kda", 1, 2),
}
CONTROLS = {
    "golden": "tensor_graph output12: PASS, 1 elements off",
    "fillpad": "mat1 and mat2 shapes cannot be multiplied",
    "zeros": "tensor_graph output12: FAILED",
    "tiles": "Run pass failed",
}
"""What is broken -> what the reports then say. `zeros`: PyPTO's own way of handing over data, which needs an NPU."""


def compile_call(name: str, control: str | None) -> None:
    """Compile the kernel of a call for NPUs, with the interpreter after every pass and the recurrence as its golden."""
    import pypto

    from kda.backends.pypto import build, chunk, interpret, recurrent
    from kda.backends.pypto.kernels import activation

    operator, T, _ = CALLS[name]
    bound = -5.0 if "bounded" in name else None
    call = golden.inputs.raw(1, T, 1, lengths=[T], lower_bound=bound, dtype=torch.bfloat16, initial_state=True)
    if name == "chunk, K first":
        call |= {"initial_state": call["initial_state"].mT.contiguous(), "state_v_first": False}
    o, state = golden.recurrent_kda_golden(**call)
    assert o.abs().max() > 0.01 and state.abs().max() > 0.01
    goldens = [o[0].bfloat16(), state.float()]
    if control == "golden":
        goldens[1][0, 0, 5, 7] += 0.01
    if control == "fillpad":
        activation.pypto.fillpad = lambda x, *_: x
    if control == "tiles":
        activation.use_tiles = lambda: pypto.set_vec_tile_shapes(1024, 128)

    def run(body: object, inputs: list[Tensor], outputs: list[Tensor], config: Config) -> None:
        interpret.set_up()
        if control == "zeros":
            interpret.entry.JitCallableWrapper._setup_verify_data = stock
        options = build.npu_options(config)
        kernel = pypto.frontend.jit(
            runtime_options=options["runtime_options"] | {"run_mode": pypto.RunMode.SIM},
            pass_options=options["pass_options"],
            verify_options={"enable_pass_verify": True, "pass_verify_pass_filter": ["all"],
                            "pass_verify_error_tol": [1e-3, 1e-3]},
        )(body)  # fmt: skip
        pypto.set_verify_golden_data(goldens=[None] * len(inputs) + [x.contiguous() for x in goldens])
        kernel(*inputs, *outputs, config)

    stock = interpret.entry.JitCallableWrapper.__dict__["_setup_verify_data"]
    chunk.run = recurrent.run = run
    getattr(kda, operator)(**call, backend="pypto")


def emit_call(name: str) -> None:
    """Compile the kernel of a call with the very options that NPUs get, as far as to their own compiler."""
    import pypto

    from kda.backends.pypto import build, chunk, recurrent

    def run(body: object, inputs: list[Tensor], outputs: list[Tensor], config: Config) -> None:
        kernel = pypto.frontend.jit(**build.npu_options(config))(body)
        definitions, _ = kernel._cached_signature
        kernel.kwargs = {"config": config}
        with pypto.options("jit_scope"):
            kernel._set_config_option()
            pypto.pypto_impl.DeviceInit()
            kernel.compile([*inputs, *outputs], definitions)

    chunk.run = recurrent.run = run
    operator, T, _ = CALLS[name]
    getattr(kda, operator)(**golden.inputs.raw(1, T, 1, dtype=torch.bfloat16, initial_state=True), backend="pypto")


def compiled(name: str, folder: Path, control: str | None = None) -> list[str]:
    """Everything that is wrong with the reports of compiling a call in a process of its own."""
    done = in_a_process(f"compile_call({name!r}, {control!r})", folder)
    if done.returncode:
        return [f"the compiler gave up: {done.stderr[-2000:]}"]
    (brief,) = folder.rglob("verify_result_brief.csv")
    with brief.open() as file:
        rows = list(csv.DictReader(file))
    # PyPTO itself forgives a few elements in a thousand.
    wrong = [
        f"{row['passName']} {row['ioflag']}: {row['verifyResult']}, {row['errorCount']} elements off, by up to "
        f"{row['maxAbsDiff']}"
        for row in rows
        if row["verifyResult"] != "PASS" or row["errorCount"] != "0"
    ]
    wrong += [line for log in folder.rglob("verify_exception.log") for line in log.read_text().splitlines()
              if not line.endswith(("result PASS", "result NO_COMPARE"))]  # fmt: skip
    counts = collections.Counter(row["passName"] for row in rows)
    if CALLS[name][1] > 512:
        ran = {row["verifyType"].partition("_PATH")[0] for row in rows}
        paths = ("TENSOR_chunks_Unroll4", "TENSOR_chunks_Unroll1")
        wrong += [f"{path} did not run" for path in paths if path not in ran]
    if (against_golden := counts.pop("tensor_graph", 0)) != 2:
        wrong.append(f"{against_golden} results were held to the golden, expected o and the state")
    if len(counts) != PASSES or set(counts.values()) != {CALLS[name][2]}:
        wrong.append(f"expected {PASSES} passes with {CALLS[name][2]} rows each, got {dict(counts)}")
    return wrong


def in_a_process(call: str, folder: Path, path: str = os.environ["PATH"]) -> subprocess.CompletedProcess[str]:
    """A call of this module in a process of its own, whose reports go to `folder`."""
    code = f"import test_compile; test_compile.{call}"
    here = Path(__file__).parent
    environment = {
        "KDA_EMULATE": "1", "OMP_NUM_THREADS": "1", "TILE_FWK_OUTPUT_DIR": str(folder), "PATH": path,
        "PYTHONPATH": str(here.parents[2]),  # the package of this tree, whichever is installed
    }  # fmt: skip
    return subprocess.run([sys.executable, "-c", code], cwd=here, env=os.environ | environment,
                          capture_output=True, text=True)  # fmt: skip


@pytest.fixture(autouse=True)
def interpreter() -> None:
    if reason := missing_pypto() or missing_interpreter():
        pytest.skip(reason)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if "K first" in n else ()) for n in CALLS])
def test_every_pass_keeps_the_result(name: str, tmp_path: Path) -> None:
    assert compiled(name, tmp_path) == []


@pytest.mark.parametrize("control", CONTROLS)
def test_a_broken_kernel_or_golden_is_seen(control: str, tmp_path: Path) -> None:
    wrong = compiled("chunk, K first", tmp_path, control)
    assert any(CONTROLS[control] in line for line in wrong), wrong


STAND_IN = """#!/bin/sh
echo "$0 $@" >> {log}
while [ "$1" ]; do [ "$1" = -o ] && : > "$2"; shift; done
"""


@pytest.mark.parametrize("name", ["chunk", "recurrent"])
def test_code_for_an_npu_comes_as_far_as_its_compiler(name: str, tmp_path: Path) -> None:
    """A script stands in for CANN's compiler and linker: the device code is emitted, nothing has compiled or run it."""
    log = tmp_path / "log"
    for tool in ("bisheng", "ld.lld"):
        stand_in = tmp_path / tool
        stand_in.write_text(STAND_IN.format(log=log))
        stand_in.chmod(0o755)
    done = in_a_process(f"emit_call({name!r})", tmp_path / "out", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr[-4000:]
    calls = log.read_text()
    assert "-x cce" in calls
    for path in ("chunks_Unroll4", "chunks_Unroll1") if name == "chunk" else ("tokens_Unroll1",):
        assert f"TENSOR_{path}" in calls, path
    (program,) = (tmp_path / "out").rglob("program.json")
    operations = program.read_text()
    assert '"DIV"' in operations and "RECIPROCAL" not in operations, "A2 and A3 compute reciprocals too roughly"
