"""The CUDA kernels compile for Hopper without a GPU, and their registers stay where they were when they were fast."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tilelang")

from kda.backends.tilelang.build import HOPPER, compile_kernel
from kda.backends.tilelang.kernels.carry import carry
from kda.backends.tilelang.kernels.chunk_delta_h import chunk_delta_h
from kda.backends.tilelang.kernels.chunk_o import chunk_o
from kda.backends.tilelang.kernels.plan import plan
from kda.backends.tilelang.kernels.recurrent import fused_recurrent
from kda.backends.tilelang.kernels.sm90.prepare import prepare as prepare_sm90

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")

SHAPE = {"HV": 32, "K": 128, "V": 128, "dtype": "bfloat16"}
STATES = {"has_initial_state": True, "has_final_state": True}
PRODUCTION = {"use_qk_l2norm": True, "use_gate": True, "bounded_gate": True, "use_beta_sigmoid": True}
RAW = {"H": 32, "g_dtype": "bfloat16", "beta_dtype": "bfloat16"}
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plan": (plan, {"HV": 32, "V": 128, "dtype": "bfloat16", "cu_dtype": "int32"}),
    "prepare, bounded gate": (prepare_sm90, SHAPE | RAW | PRODUCTION),
    "prepare, log decay, packed, fp16": (
        prepare_sm90,
        SHAPE | {"dtype": "float16", "H": 32, "g_dtype": "float32", "beta_dtype": "float32", "varlen": True},
    ),
    "carry, 128 columns": (carry, SHAPE | STATES | {"block_V": 128}),
    "carry, 64 columns": (carry, SHAPE | STATES | {"block_V": 64}),
    "carry, packed": (carry, SHAPE | STATES | {"block_V": 128, "varlen": True}),
    "chunk_delta_h, 64 columns": (chunk_delta_h, SHAPE | STATES),
    "chunk_delta_h, 128 columns, packed": (chunk_delta_h, SHAPE | STATES | {"block_V": 128, "varlen": True}),
    "chunk_o": (chunk_o, SHAPE),
    "fused_recurrent": (
        fused_recurrent,
        SHAPE | RAW | PRODUCTION | {"has_initial_state": True, "inplace": True, "slot_dtype": "int32"},
    ),
    "fused_recurrent, drafts, K first, with gaps": (
        fused_recurrent,
        SHAPE
        | RAW
        | {
            "cu_dtype": "int32",
            "has_initial_state": True,
            "inplace": True,
            "gaps": True,
            "block_V": 16,
            "state_v_first": False,
            "slot_dtype": "int64",
            "slots_per_token": True,
            "accepted_dtype": "int64",
        },
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_compiles_without_spills(name: str, tmp_path: Path) -> None:
    builder, parameters = KERNELS[name]
    from tilelang.contrib import nvcc

    source = tmp_path / "kernel.cu"
    source.write_text(compile_kernel(builder(**parameters), HOPPER).get_kernel_source())
    options = [*nvcc.default_compile_options(), "--use_fast_math", "-O3", "-w", "-Xptxas", "-v"]
    command = ["nvcc", "--cubin", f"-arch={HOPPER}", *options, "-o", str(tmp_path / "kernel.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    spilled = [int(x) for x in re.findall(r"(\d+) bytes spill", done.stderr)]
    assert spilled and max(spilled) == 0, spilled
    assert "warpgroup.wait is injected" not in done.stderr  # products meant to run on by themselves do
