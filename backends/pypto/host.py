"""What the hosts of both operators share: the call's tensors as the kernels take them.

No tensor value comes to the host. What is done on the device by torch: contiguous copies of strided inputs, cu_seqlens
in int32, exp of A_log.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from kda.backends.call import KdaCall


def output(call: KdaCall) -> Tensor:
    """o `[B, T, HV, V]`: 0, as it must be where no sequence's token is."""
    return torch.zeros_like(call.v, memory_format=torch.contiguous_format)


def rows(call: KdaCall) -> list[Tensor]:
    """q, k, v, g, beta as `[B * T, heads, dim]`, then the gate's rate exp(A_log) and bias `[HV, K]`."""
    inputs = call.q, call.k, call.v, call.g, call.beta.unsqueeze(-1)
    tensors = [x.resolve_neg().contiguous().flatten(0, 1) for x in inputs]
    if call.A_log is None:
        rate = _filled(1.0, call.HV, call.K, call.q.device)
    else:
        # An infinite rate would make 0 * rate NaN where softplus is 0.
        largest = math.log(torch.finfo(torch.float32).max) - 1.0
        rate = call.A_log.clamp(max=largest).exp().unsqueeze(-1).repeat(1, call.K)
    bias = _filled(0.0, call.HV, call.K, call.q.device) if call.dt_bias is None else call.dt_bias
    return [*tensors, rate, bias.resolve_neg().contiguous().view(call.HV, call.K)]


def bounds(call: KdaCall) -> Tensor:
    """cu_seqlens `[N + 1]` int32; for a batch of equal lengths, theirs."""
    if call.cu_seqlens is None:
        return _equal_bounds(call.B, call.T, call.q.device)
    return call.cu_seqlens.to(torch.int32).contiguous()


def initial_states(call: KdaCall) -> Tensor:
    """The states that the sequences start from, contiguous, in the caller's layout."""
    if call.initial_state is not None:
        return call.initial_state.resolve_neg().contiguous()
    return torch.zeros(call.N, *call.state_shape, dtype=torch.float32, device=call.q.device)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is remembered must serve outside of it as well
def _equal_bounds(B: int, T: int, device: torch.device) -> Tensor:
    return torch.arange(B + 1, dtype=torch.int32, device=device) * T


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is remembered must serve outside of it as well
def _filled(value: float, heads: int, K: int, device: torch.device) -> Tensor:
    return torch.full((heads, K), value, dtype=torch.float32, device=device)
