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
from .chunk_table import columns, num_slots, parts


class Form(NamedTuple):
    """What a call's shapes, dtypes and options decide: computed once for all calls that share them."""

    kernels: Kernels
    dtype: torch.dtype  # of q, k, v and the table; g's and beta's own follow
    g_dtype: torch.dtype
    beta_dtype: torch.dtype
    slots: int
    width: int
    state_shape: tuple[int, ...]


class Prepared(NamedTuple):
    """A call after M1 to M3: its tables, and the arguments by which the kernels that follow find its sequences."""

    form: Form
    o: Tensor  # [B, T, HV, V], still empty but for its padding rows, which are 0
    table: Tensor  # [slots, HV, C, width]: qg, kg, w, u and Aqk
    decay: Tensor  # [slots, HV, K] fp32
    sequences: tuple[Any, ...]  # cu_seqlens, or the length of all


def chunk_kda(call: KdaCall) -> tuple[Tensor, Tensor | None]:
    """Run the call by the recurrence that keeps no snapshots of the state."""
    if call.N == 0 or call.T == 0:
        return torch.zeros_like(call.v), _carried_over(call)
    with torch.cuda.device_of(call.q):
        p = _prepare(call)
        initial, final = _states(call, p.form)
        p.form.kernels.recurrence(p.table, p.decay, *initial, *p.sequences, p.o, *final)
    o = p.o if p.o.dtype == call.v.dtype else p.o.to(call.v.dtype)
    return o, final[0] if final else None


def stages(call: KdaCall) -> dict[str, Tensor]:
    """The tables of M2 to M4 under the golden's names, chunk by chunk, by the kernels that keep snapshots."""
    with torch.cuda.device_of(call.q):
        p = _prepare(call)
        h = p.table.new_empty(p.form.slots, call.HV, call.K, call.V)
        v_new = p.table.new_empty(p.form.slots, call.HV, CHUNK_SIZE, call.V)
        initial, final = _states(call, p.form)
        p.form.kernels.chunk_delta_h(p.table, p.decay, *initial, *p.sequences, h, v_new, *final)
    tables = parts(p.table, call.K, call.V) | {"decay": p.decay, "h": h, "v_new": v_new}
    used = _used_slots(call)
    return {name: table[used] for name, table in tables.items()}


def _form(call: KdaCall) -> Form:
    if (form := call.memo.get(__name__)) is None:
        built = kernels(config(call))
        dtypes = (getattr(torch, name) for name in (built.config.dtype, built.config.g_dtype, built.config.beta_dtype))
        slots = num_slots(call.B * call.T, call.N, call.cu_seqlens is not None)
        state = (call.V, call.K) if call.state_v_first else (call.K, call.V)
        form = Form(built, *dtypes, slots, columns(call.K, call.V).width, (call.N, call.HV, *state))
        call.memo[__name__] = form
    return form


def _prepare(call: KdaCall) -> Prepared:
    form = _form(call)
    q, k, v = rows(call.q, form.dtype), rows(call.k, form.dtype), rows(call.v, form.dtype)
    g, beta = rows(call.g, form.g_dtype), rows(call.beta, form.beta_dtype)
    o = torch.empty_like(v)
    if call.cu_seqlens is None:
        sequences = owners = (call.T,)
    else:
        cu_seqlens = call.cu_seqlens.contiguous()
        slot_seq = torch.empty(form.slots, dtype=torch.int32, device=q.device)
        form.kernels.plan(cu_seqlens, slot_seq, o)
        sequences, owners = (cu_seqlens,), (cu_seqlens, slot_seq)
    table = q.new_empty(form.slots, call.HV, CHUNK_SIZE, form.width)
    decay = q.new_empty(form.slots, call.HV, call.K, dtype=torch.float32)
    form.kernels.prepare(q, k, v, g, beta, *gate(call), call.scale, *owners, table, decay)
    return Prepared(form, o, table, decay, sequences)


def rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in dtype, contiguous, and aligned as wide loads and TMA need it."""
    if x.dtype != dtype:
        x = x.to(dtype)
    if not x.is_contiguous():
        x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    return x


def gate(call: KdaCall) -> tuple[Any, ...]:
    """A_log, dt_bias and lower_bound as arguments of a kernel; none of them without the gate."""
    if not call.use_gate_in_kernel:
        return ()
    f32 = torch.float32
    A_log = _zeros(call.HV, call.q.device) if call.A_log is None else rows(call.A_log, f32)
    dt_bias = _zeros(call.HV * call.K, call.q.device) if call.dt_bias is None else rows(call.dt_bias, f32)
    return (A_log, dt_bias) if call.lower_bound is None else (A_log, dt_bias, call.lower_bound)


@functools.cache
def _zeros(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, device=device)


def _states(call: KdaCall, form: Form) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The initial and the final state as arguments of a kernel; none where the call has none."""
    initial = () if call.initial_state is None else (rows(call.initial_state, torch.float32),)
    final = (call.q.new_empty(form.state_shape, dtype=torch.float32),) if call.output_final_state else ()
    return initial, final


def _carried_over(call: KdaCall) -> Tensor | None:
    """The final state of a call without tokens."""
    if not call.output_final_state:
        return None
    if call.initial_state is not None:
        return call.initial_state.clone()
    return call.q.new_zeros(_form(call).state_shape, dtype=torch.float32)


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
