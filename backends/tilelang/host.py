"""What the hosts of both operators share: a call's tensors as the kernels take them, and what they are built for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda.backends.call import KdaCall

from .build import CPU, target_for


def dtypes(call: KdaCall) -> dict[str, torch.dtype]:
    """What a kernel gets: `dtype` (q, k, v, o), `g_dtype` and `beta_dtype`."""
    if target_for(call.q.device) == CPU:
        return dict.fromkeys(("dtype", "g_dtype", "beta_dtype"), torch.float32)
    return {"dtype": call.q.dtype, "g_dtype": call.g.dtype, "beta_dtype": call.beta.dtype}


def differentiated_in_bf16(call: KdaCall) -> bool:
    """Whether the backward pass of chunk_kda takes q, k and v in bf16: fp16 can't hold gradients with a loss scale."""
    return call.q.dtype == torch.float16


def activation(call: KdaCall) -> dict[str, bool]:
    """What M1 does, as a kernel's builder takes it."""
    return {
        "use_qk_l2norm": call.use_qk_l2norm_in_kernel, "use_gate": call.use_gate_in_kernel,
        "bounded_gate": call.lower_bound is not None, "use_beta_sigmoid": call.use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": call.allow_neg_eigval,
    }  # fmt: skip


def aligned(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in dtype, contiguous, and at an address that wide loads and TMA take; its memory holds its values."""
    if x.dtype != dtype:
        x = x.to(dtype)
    if not x.is_contiguous() or x.is_neg():
        x = x.resolve_neg().contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    return x


def gate(call: KdaCall) -> tuple[Any, ...]:
    """A_log, dt_bias and lower_bound as arguments of a kernel; none of them without the gate."""
    if not call.use_gate_in_kernel:
        return ()
    f32 = torch.float32
    A_log = call.q.new_zeros(call.HV, dtype=f32) if call.A_log is None else aligned(call.A_log, f32)
    dt_bias = call.q.new_zeros(call.HV * call.K, dtype=f32) if call.dt_bias is None else aligned(call.dt_bias, f32)
    return (A_log, dt_bias) if call.lower_bound is None else (A_log, dt_bias, call.lower_bound)
