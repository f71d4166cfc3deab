"""The backend for Ascend NPUs: PyPTO kernels for chunk_kda and fused_recurrent_kda.

With KDA_EMULATE=1 the same kernel bodies also run on CPU tensors, slowly, through PyPTO's interpreter. That is how they
were verified; they have not run on an NPU yet.
"""

from __future__ import annotations

import functools
import importlib
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from kda.backends.call import KdaCall
from kda.backends.environment import emulating
from kda.backends.pool import with_dense_states

from .calculator import cache
from .detect import cann, import_failure, missing_interpreter, missing_npu, missing_pypto

__all__ = [
    "about", "cache", "chunk_kda", "differentiable", "fused_recurrent_kda", "model", "refuses", "stages", "takes",
    "unusable", "versions",
]  # fmt: skip

about = (
    "PyPTO kernels, interpreter-verified: the tests execute them on the CPU op by op, they have not run on an NPU yet; "
    "gradients are torch's, computed anew"
)
differentiable = False
takes = frozenset((
    "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "A_log", "dt_bias", "lower_bound", "cu_seqlens", "state_v_first",
    "inplace_final_state", "ssm_state_indices", "num_accepted_tokens", "has_initial_state", "null_slot",
))  # fmt: skip

HEAD_DIMS = (64, 128)
MOST_ELEMENTS = 2**31 - 1
"""Of one tensor, as PyPTO counts them in int32."""


def unusable() -> list[str]:
    """Why the kernels cannot run on this machine."""
    reasons = [missing_pypto(), missing_npu() and (missing_interpreter() if emulating() else missing_npu())]
    return [reason for reason in reasons if reason]


def refuses(call: KdaCall) -> list[str]:
    """Every reason why the kernels cannot take the call."""
    reasons = []
    device = call.q.device.type
    if device == "cpu" and emulating():
        if reason := missing_interpreter():
            reasons.append(reason)
    elif device != "npu":
        reasons.append(f"its tensors must be on npu, got {device}")
    if call.q.dtype == torch.float64:
        reasons.append("it computes in float32, got float64")
    for name, size in (("K", call.K), ("V", call.V)):
        if size not in HEAD_DIMS:
            reasons.append(f"{name} must be {' or '.join(map(str, HEAD_DIMS))}, got {size}")
    states = max(call.N, call.B * call.T * call.state_per_token)
    sizes = [call.B * call.T * call.HV * max(call.K, call.V), states * math.prod(call.state_shape)]
    if call.initial_state is not None:
        sizes.append(call.initial_state.numel())
    if (elements := max(sizes)) > MOST_ELEMENTS:
        reasons.append(f"a tensor must have fewer than 2^31 elements, got {elements}")
    runs = not isinstance(call.q, FakeTensor) and not missing_pypto()
    if not reasons and runs and (reason := import_failure()):  # which only an import can tell
        reasons.append(reason)
    return reasons


def chunk_kda(call: KdaCall) -> tuple[Tensor, Tensor | None]:
    """Run the call: o in v's shape and dtype, and the final state if the call asks for it.

    States in slots or in half precision are gathered before the kernel and put back after it.
    """
    return with_dense_states(call, _host("chunk").chunk_kda)


def fused_recurrent_kda(call: KdaCall) -> tuple[Tensor, Tensor | None]:
    """As `chunk_kda`, token by token, with state pools."""
    return _host("recurrent").fused_recurrent_kda(call)


def stages(call: KdaCall) -> dict[str, Tensor]:
    """The tensors of M1 to M4, named and laid out as the golden's, 128 tokens a chunk."""
    return _host("chunk").stages(call)


def model(call: KdaCall) -> Any:
    """The call in PyPTO's cost model: a `cost_model.Model`. Raises RuntimeError where PyPTO fails."""
    return _host("cost_model").model(call)


def versions() -> list[tuple[str, str]]:
    """What the kernels run on beside PyPTO, with its version."""
    return [("cann", cann() or "not set up")]


@functools.cache
def _host(name: str) -> ModuleType:
    """A module that imports PyPTO. Raises RuntimeError, with the reason, if that cannot be imported."""
    if reason := import_failure():
        raise RuntimeError(reason)
    return importlib.import_module(f"{__name__}.{name}")
