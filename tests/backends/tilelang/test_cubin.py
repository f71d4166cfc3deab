"""The CUDA kernels compile for Hopper without a GPU, fit its memory, and keep to the registers they had when fast."""

from __future__ import annotations

import re
import shutil
from typing import Any

import pytest

pytest.importorskip("tilelang")

from kda.backends.tilelang.build import HOPPER, compile_kernel
from kda.backends.tilelang.kernels.backward.carry import carry as carry_backward
from kda.backends.tilelang.kernels.backward.prepare import prepare as prepare_backward
from kda.backends.tilelang.kernels.carry import carry
from kda.backends.tilelang.kernels.chunk_delta_h import chunk_delta_h
from kda.backends.tilelang.kernels.chunk_o import chunk_o
from kda.backends.tilelang.kernels.plan import plan
from kda.backends.tilelang.kernels.plan_segments import plan_segments
from kda.backends.tilelang.kernels.recurrent import fused_recurrent
from kda.backends.tilelang.kernels.scan import scan
from kda.backends.tilelang.kernels.sm90.prepare import prepare as prepare_sm90
from kda.backends.tilelang.kernels.summary import summary

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")

SHARED_MEMORY = 232448
"""Bytes that a block on a Hopper GPU can have. nvcc does not hold a kernel to them, since most are asked for when it is
launched: one that asks for more compiles, and fails on a GPU."""

SPILLS = {"prepare, backward": 256}
"""Bytes that a kernel may spill, by how its name begins. Of this one a block has 512 threads of at most 128 registers,
and a thread holds the decays of two blocks of rows all the time: what is spilled is read again once a phase."""

SHAPE = {"HV": 32, "K": 128, "V": 128, "dtype": "bfloat16"}
STATES = {"has_initial_state": True, "has_final_state": True}
CARRY = SHAPE | STATES | {"with_ainv": False}
CUT = SHAPE | {"with_ainv": False}
PRODUCTION = {"use_qk_l2norm": True, "use_gate": True, "bounded_gate": True, "use_beta_sigmoid": True}
D_STATES = {"has_d_final_state": True, "has_d_initial_state": True}
RAW = {"H": 32, "g_dtype": "bfloat16", "beta_dtype": "bfloat16"}
LOG_DECAY = {"H": 32, "g_dtype": "float32", "beta_dtype": "float32"}
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plan": (plan, {"HV": 32, "V": 128, "dtype": "bfloat16", "cu_dtype": "int32"}),
    "plan, backward": (
        plan,
        {"HV": 32, "K": 128, "V": 128, "cu_dtype": "int64", "dtype": "bfloat16"}
        | {"g_dtype": "float32", "beta_dtype": "float32"},
    ),
    "prepare, bounded gate": (prepare_sm90, SHAPE | RAW | PRODUCTION),
    "prepare, log decay, packed, fp16": (
        prepare_sm90,
        SHAPE | LOG_DECAY | {"dtype": "float16", "varlen": True},
    ),
    "prepare, with Ainv": (prepare_sm90, SHAPE | RAW | PRODUCTION | {"with_ainv": True}),
    "carry, 128 columns": (carry, CARRY | {"block_V": 128}),
    "carry, 64 columns": (carry, CARRY | {"block_V": 64, "with_ainv": True}),
    "carry, packed": (carry, CARRY | {"block_V": 128, "varlen": True}),
    "carry, of segments": (carry, CUT | {"has_final_state": True, "cut": True}),
    "carry, of segments, packed": (carry, CUT | {"has_final_state": True, "cut": True, "varlen": True}),
    "plan_segments": (plan_segments, {"HV": 8, "tiles": 2, "processors": 132, "cu_dtype": "int64"}),
    "summary": (summary, CUT),
    "summary, packed, fp16": (summary, CUT | {"varlen": True, "dtype": "float16"}),
    "scan": (scan, SHAPE | {"has_initial_state": True}),
    "scan, packed, fp16": (scan, SHAPE | {"has_initial_state": False, "varlen": True, "dtype": "float16"}),
    "chunk_delta_h, 64 columns": (chunk_delta_h, SHAPE | STATES),
    "chunk_delta_h, 128 columns": (chunk_delta_h, SHAPE | STATES | {"block_V": 128}),
    "chunk_delta_h, packed": (chunk_delta_h, SHAPE | STATES | {"varlen": True}),
    "chunk_o": (chunk_o, SHAPE),
    "carry, backward, 64 columns": (carry_backward, SHAPE | D_STATES),
    "carry, backward, 128 columns": (carry_backward, SHAPE | D_STATES | {"block_V": 128}),
    "carry, backward, packed": (carry_backward, SHAPE | D_STATES | {"varlen": True}),
    "prepare, backward, bounded gate": (prepare_backward, SHAPE | RAW | PRODUCTION),
    "prepare, backward, softplus gate, packed": (
        prepare_backward,
        SHAPE | RAW | PRODUCTION | {"bounded_gate": False, "varlen": True, "cu_dtype": "int64"},
    ),
    "prepare, backward, log decay": (prepare_backward, SHAPE | LOG_DECAY),
    "prepare, backward, K 64": (prepare_backward, SHAPE | RAW | PRODUCTION | {"K": 64}),
    "prepare, backward, V 64": (prepare_backward, SHAPE | RAW | PRODUCTION | {"V": 64}),
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

QUICK = {
    "plan", "prepare, bounded gate", "carry, 128 columns", "carry, 64 columns", "chunk_delta_h, 64 columns", "chunk_o",
    "carry, backward, 64 columns", "prepare, backward, bounded gate", "fused_recurrent",
}  # fmt: skip
"""Those that every change waits for: each kernel once, in the production form."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in KERNELS])
def test_compiles_without_spills_and_fits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    builder, parameters = KERNELS[name]
    kernel, report = compiled_aloud(builder(**parameters), monkeypatch)
    spilled = [int(x) for x in re.findall(r"(\d+) bytes spill", report)]
    assert spilled and max(spilled) <= next((x for kind, x in SPILLS.items() if name.startswith(kind)), 0), spilled
    assert "warpgroup.wait is injected" not in report  # products meant to run on by themselves do
    static = sum(int(x) for x in re.findall(r"(\d+) bytes smem", report))
    assert 0 < static + dynamic_shared_memory(kernel) <= SHARED_MEMORY


def compiled_aloud(traced: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    """The kernel, compiled anew, and what nvcc says of it."""
    from tilelang.contrib import nvcc

    said: list[str] = []
    compile_cuda = nvcc.compile_cuda

    def aloud(code: str, *arguments: Any, options: list[str], **_: Any) -> bytearray:
        return compile_cuda(code, *arguments, options=[*options, "-w", "-Xptxas", "-v"], verbose=True)

    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    monkeypatch.setattr("tilelang.cache.cuda_binary_cache.CUDABinaryCache.load", lambda *_: None)
    monkeypatch.setattr(nvcc, "compile_cuda", aloud)
    monkeypatch.setattr(nvcc.logger, "info", lambda text, *values: said.append(text % values))
    kernel = compile_kernel(traced, HOPPER)
    return kernel, "\n".join(said)


def dynamic_shared_memory(kernel: Any) -> int:
    """Bytes that a launch asks for: its last argument, if the kernel has such memory."""
    if "extern __shared__" not in kernel.get_kernel_source():
        return 0
    before_launch, *_ = kernel.get_host_source().partition("_kernel_packed == NULL")
    return int(re.findall(r"v_int64\) = \(\(int64_t\)(\d+)\);", before_launch)[-1])
