"""A call of chunk_kda on its way to the kernel: allocation and layout alone.

No tensor value comes to the host, `stages` excepted. What is done on the device by torch: contiguous copies of strided
inputs, cu_seqlens in int32, exp of A_log.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from kda.backends.call import KdaCall

from . import constants
from .build import run
from .chunk_kernel import chunk_kda as chunk_kernel
from .config import config
from .stages_kernel import NAMES, chunk_kda_stages


def chunk_kda(call: KdaCall) -> tuple[Tensor, Tensor | None]:
    """Run the call: o in v's shape and dtype, and the final state if the call asks for it."""
    o = output(call)
    initial = initial_states(call)
    if call.B * call.T == 0:
        return o, initial.clone() if call.output_final_state else None
    final = torch.empty_like(initial)
    inputs = [*rows(call), bounds(call), initial, *_constants(call.q.device)]
    run(chunk_kernel, inputs, [o.view(-1, call.HV, call.V), final], config(call))
    return o, final if call.output_final_state else None


def stages(call: KdaCall) -> dict[str, Tensor]:
    """The tensors of M1 to M4 under the golden's names and in its layout, CHUNK tokens a chunk, in fp32."""
    cu = bounds(call)
    counts = (cu.diff() + constants.CHUNK - 1) // constants.CHUNK
    chunks, C, K, V = int(counts.sum()), constants.CHUNK, call.K, call.V
    shapes = {"beta": (C, 1), "Akk": (C, C), "Aqk": (C, C), "Ainv": (C, C), "decay": (1, K), "u": (C, V)}
    shapes |= {"h": (V, K), "v_new": (C, V)}
    tables = {name: call.v.new_zeros(chunks, call.HV, *shapes.get(name, (C, K)), dtype=torch.float32) for name in NAMES}
    if chunks:
        first = (counts.cumsum(0) - counts).to(torch.int32)
        inputs = [*rows(call), cu, initial_states(call), *_constants(call.q.device), first]
        run(chunk_kda_stages, inputs, list(tables.values()), config(call))
    tables["beta"], tables["decay"], tables["h"] = tables["beta"][..., 0], tables["decay"][..., 0, :], tables["h"].mT
    return tables


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
    return torch.zeros(call.N, *call.state_shape, device=call.q.device)


@functools.lru_cache(maxsize=64)
def _equal_bounds(B: int, T: int, device: torch.device) -> Tensor:
    return torch.arange(B + 1, dtype=torch.int32, device=device) * T


@functools.lru_cache(maxsize=64)
def _filled(value: float, heads: int, K: int, device: torch.device) -> Tensor:
    return torch.full((heads, K), value, device=device)


def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    return constants.decay_sums(device), constants.masks(device)
