"""The backend for NVIDIA GPUs: TileLang kernels for chunk_kda (plan -> prepare -> carry) and fused_recurrent_kda.

With KDA_EMULATE=1 the same kernel sources also run on CPU tensors, in float32 and slowly: to check them without a GPU.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from kda.backends.call import KdaCall
from kda.backends.environment import emulating
from kda.backends.pool import Result, with_dense_states

from . import chunk
from .ahead import build_ahead, build_all, wanted
from .backward import chunk_kda_backward
from .build import HOPPER, target_for
from .chunk import chunk_kda_keeping, stages
from .detect import import_failure, missing_compilers, missing_device, missing_tilelang
from .kept import cache, is_empty
from .recurrent import fused_recurrent_kda

__all__ = [
    "about", "build_ahead", "build_all", "cache", "chunk_kda", "chunk_kda_backward", "chunk_kda_keeping",
    "differentiable", "fused_recurrent_kda", "refuses", "stages", "takes", "unusable", "wanted",
]  # fmt: skip

about = (
    "TileLang kernels, for chunk_kda's gradients too; fused_recurrent_kda's are torch's, computed anew. The tile-level "
    "kernels are executed on the CPU by the tests; prepare's thread-level twin, which Hopper GPUs run, is held to the "
    "golden on a GPU alone"
)
differentiable = False
takes = frozenset((
    "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "A_log", "dt_bias", "lower_bound", "cu_seqlens", "state_v_first",
    "inplace_final_state", "ssm_state_indices", "num_accepted_tokens", "has_initial_state", "null_slot",
    "intermediate_states_buffer", "intermediate_state_indices",
))  # fmt: skip

HEAD_DIMS = (64, 128)


def chunk_kda(call: KdaCall) -> Result:
    """Run the call; its states are gathered before the kernels and put back after them where they are in slots."""
    return with_dense_states(call, chunk.chunk_kda)


def unusable() -> list[str]:
    """Why the kernels cannot run on this machine."""
    reasons = [missing_tilelang(), missing_device()]
    if not any(reasons) and (emulating() or is_empty()):  # a GPU can run what is kept from before
        reasons = [missing_compilers(nvcc=not emulating())]
    return [reason for reason in reasons if reason]


def refuses(call: KdaCall) -> list[str]:
    """Every reason why the kernels cannot take the call."""
    reasons = []
    device = call.q.device.type
    if device != "cuda" and not (device == "cpu" and emulating()):
        reasons.append(f"its tensors must be on cuda, got {device}")
    if device == "cuda" and (target := target_for(call.q.device)) != HOPPER:
        reasons.append(f"its kernels are for Hopper GPUs ({HOPPER}), got {target}")
    if device == "cuda" and call.q.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"q, k and v must be bfloat16 or float16, got {str(call.q.dtype).removeprefix('torch.')}")
    if call.q.dtype == torch.float64:
        reasons.append("the CPU path computes in float32, got float64")
    for name, size in (("K", call.K), ("V", call.V)):
        if size not in HEAD_DIMS:
            reasons.append(f"{name} must be {' or '.join(map(str, HEAD_DIMS))}, got {size}")
    if call.B * call.T >= 2**31:
        reasons.append(f"B * T must be below 2^31, got {call.B * call.T}")
    if not reasons and (reason := _cannot_build(call)):
        reasons.append(reason)
    return reasons


def _cannot_build(call: KdaCall) -> str | None:
    """Why the kernels of the call, which are not on disk, cannot be built; or None."""
    on_cpu = call.q.device.type == "cpu"
    reason = missing_compilers(nvcc=not on_cpu)
    if reason and (on_cpu or not all(spec.kept().exists() for spec in wanted(call))):
        return reason
    # Only an import can tell whether TileLang works. It takes seconds, and calls whose kernels are kept do without.
    runs = not isinstance(call.q, FakeTensor) and not missing_tilelang()
    return import_failure() if runs and (on_cpu or is_empty()) else None
