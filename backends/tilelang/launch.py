"""A call on its way to the kernels: rows and chunk tables in memory, then plan -> prepare -> recurrence.

No tensor value is read here, so that a call can be captured in a CUDA graph; everything runs on the current stream.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda.backends.call import KdaCall
from kda.golden.constants import CHUNK_SIZE

from .build import Kernels, config, kernels


class Prepared(NamedTuple):
    """A call after M1 to M3: its tables, and the arguments by which the kernels that follow find its sequences."""

    kernels: Kernels
    o: Tensor  # [B * T, HV, V], still empty but for its padding rows, which are 0
    qg: Tensor  # [slots, HV, C, K]
    kg: Tensor  # [slots, HV, C, K]
    w: Tensor  # [slots, HV, C, K]
    u: Tensor  # [slots, HV, C, V]
    aqk: Tensor  # [slots, HV, C, C]
    decay: Tensor  # [slots, HV, K] fp32
    sequences: tuple[Any, ...]  # cu_seqlens, or the length of all


def chunk_kda(call: KdaCall) -> tuple[Tensor, Tensor | None]:
    """Run the call by the recurrence that keeps no snapshots of the state."""
    if call.N == 0 or call.T == 0:
        return torch.zeros_like(call.v), _carried_over(call)
    with torch.cuda.device_of(call.q):
        p = _prepare(call)
        initial, final = _states(call)
        p.kernels.recurrence(p.qg, p.kg, p.w, p.u, p.aqk, p.decay, *initial, *p.sequences, p.o, *final)
    return p.o.view(call.v.shape).to(call.v.dtype), final[0] if final else None


def stages(call: KdaCall) -> dict[str, Tensor]:
    """The tables of M2 to M4 under the golden's names, chunk by chunk, by the kernels that keep snapshots."""
    with torch.cuda.device_of(call.q):
        p = _prepare(call)
        h, v_new = p.u.new_empty(*p.u.shape[:2], call.K, call.V), torch.empty_like(p.u)
        initial, final = _states(call)
        p.kernels.chunk_delta_h(p.kg, p.w, p.u, p.decay, *initial, *p.sequences, h, v_new, *final)
    tables = {"Aqk": p.aqk, "qg": p.qg, "kg": p.kg, "decay": p.decay, "w": p.w, "u": p.u, "h": h, "v_new": v_new}
    used = _used_slots(call)
    return {name: table[used] for name, table in tables.items()}


def _prepare(call: KdaCall) -> Prepared:
    built = kernels(config(call))
    dtype, g_dtype, beta_dtype = (getattr(torch, name) for name in built.config[5:8])
    q, k, v = _rows(call.q, dtype), _rows(call.k, dtype), _rows(call.v, dtype)
    g, beta = _rows(call.g, g_dtype), _rows(call.beta, beta_dtype)
    HV, K, V, C = call.HV, call.K, call.V, CHUNK_SIZE
    o = torch.empty_like(v)
    if call.cu_seqlens is None:
        count = call.N * -(-call.T // C)
        sequences = slots = (call.T,)
    else:
        count = call.T // C + call.N
        cu_seqlens = call.cu_seqlens.contiguous()
        slot_seq = torch.empty(count, dtype=torch.int32, device=q.device)
        built.plan(cu_seqlens, slot_seq, o)
        sequences, slots = (cu_seqlens,), (cu_seqlens, slot_seq)
    qg, kg, w = (q.new_empty(count, HV, C, K) for _ in range(3))
    u, aqk = q.new_empty(count, HV, C, V), q.new_empty(count, HV, C, C)
    decay = torch.empty(count, HV, K, dtype=torch.float32, device=q.device)
    built.prepare(q, k, v, g, beta, *_gate(call), call.scale, *slots, qg, kg, w, u, aqk, decay)
    return Prepared(built, o, qg, kg, w, u, aqk, decay, sequences)


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`[B, T, ...]` as `[B * T, ...]`, contiguous and aligned as wide loads and TMA need it."""
    if x.dtype != dtype:
        x = x.to(dtype)
    if not x.is_contiguous():
        x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    return x[0] if x.shape[0] == 1 else x.flatten(0, 1)


def _gate(call: KdaCall) -> tuple[Any, ...]:
    if not call.use_gate_in_kernel:
        return ()
    A_log = _zeros(call.HV, 1, call.q.device)[:, 0] if call.A_log is None else call.A_log.contiguous()
    dt_bias = _zeros(call.HV, call.K, call.q.device) if call.dt_bias is None else call.dt_bias.contiguous()
    return (A_log, dt_bias) if call.lower_bound is None else (A_log, dt_bias, call.lower_bound)


@functools.cache
def _zeros(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, columns, device=device)


def _states(call: KdaCall) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The initial and the final state as arguments of a kernel; none where the call has none."""
    shape = (call.N, call.HV, call.V, call.K) if call.state_v_first else (call.N, call.HV, call.K, call.V)
    initial = () if call.initial_state is None else (call.initial_state.contiguous(),)
    final = (torch.empty(shape, dtype=torch.float32, device=call.q.device),) if call.output_final_state else ()
    return initial, final


def _carried_over(call: KdaCall) -> Tensor | None:
    """The final state of a call without tokens."""
    if not call.output_final_state:
        return None
    if call.initial_state is not None:
        return call.initial_state.clone()
    _, final = _states(call)
    return final[0].zero_()


def _used_slots(call: KdaCall) -> Tensor:
    """The slots that hold chunks, in order. Reads cu_seqlens: for the stages only."""
    if call.cu_seqlens is None:
        return torch.arange(call.N * -(-call.T // CHUNK_SIZE), device=call.q.device)
    slots = [
        bos // CHUNK_SIZE + n + i
        for n, (bos, eos) in enumerate(itertools.pairwise(call.cu_seqlens.tolist()))
        for i in range(-(-(eos - bos) // CHUNK_SIZE))
    ]
    return torch.tensor(slots, dtype=torch.long, device=call.q.device)
