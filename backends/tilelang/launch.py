"""A call of chunk_kda on its way to its kernels: chunk tables in memory, then plan -> prepare -> recurrence.

No tensor value is read here, so that a call can be captured in a CUDA graph; everything runs on the current stream.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda.backends.call import KdaCall
from kda.golden.constants import CHUNK_SIZE

from .build import CPU, HOPPER, Kernel, activation, build, dtypes, processors, target_for
from .chunk_table import columns, num_slots, parts

PREPARE = {CPU: "prepare.prepare", HOPPER: "prepare_hopper.prepare"}
"""prepare's twins."""


class Form(NamedTuple):
    """What a call's shapes, dtypes and options decide: computed once for all calls that share them."""

    plan: Kernel | None  # of packed calls
    prepare: Kernel
    recurrence: Kernel
    dtype: torch.dtype  # of q, k, v and the table
    g_dtype: torch.dtype
    beta_dtype: torch.dtype
    table_shape: tuple[int, ...]


class Prepared(NamedTuple):
    """A call after M1 to M3: its tables, and the arguments by which the kernels that follow find its sequences."""

    o: Tensor  # [B, T, HV, V], still empty but for its padding rows, which are 0
    table: Tensor  # [slots, HV, C, width]: qg, kg, w, u and Aqk
    decay: Tensor  # [slots, HV, K] fp32
    sequences: tuple[Any, ...]  # cu_seqlens and their order, or the length of all


def chunk_kda(call: KdaCall) -> tuple[Tensor, Tensor | None]:
    """Run the call by the recurrence that keeps no snapshots of the state."""
    if call.N == 0 or call.T == 0:
        return call.v.new_zeros(call.v.shape), untouched(call)
    with torch.cuda.device_of(call.q):
        p = _prepare(call)
        initial, final = _states(call)
        _form(call).recurrence(p.table, p.decay, *initial, *p.sequences, p.o, *final)
    o = p.o if p.o.dtype == call.v.dtype else p.o.to(call.v.dtype)
    return o, final[0] if final else None


def stages(call: KdaCall) -> dict[str, Tensor]:
    """The tables of M2 to M4 under the golden's names, chunk by chunk, by the kernel that keeps snapshots."""
    with torch.cuda.device_of(call.q):
        p = _prepare(call)
        slots = p.table.shape[0]
        h = p.table.new_empty(slots, call.HV, call.V, call.K)
        v_new = p.table.new_empty(slots, call.HV, CHUNK_SIZE, call.V)
        initial, final = _states(call)
        chunk_delta_h = _over_sequences("chunk_delta_h.chunk_delta_h", call)
        chunk_delta_h(p.table, p.decay, *initial, *p.sequences, h, v_new, *final)
    tables = parts(p.table, call.K, call.V) | {"decay": p.decay, "h": h.mT, "v_new": v_new}
    used = _used_slots(call)
    return {name: table[used] for name, table in tables.items()}


def _form(call: KdaCall) -> Form:
    if (form := call.memo.get(__name__)) is None:
        form = call.memo[__name__] = _make_form(call)
    return form


def _make_form(call: KdaCall) -> Form:
    target, types, packed = target_for(call.q.device), dtypes(call), call.cu_seqlens is not None
    plan = None
    if packed:
        plan = build(target, "plan.plan", HV=call.HV, V=call.V, dtype=types["dtype"], cu_dtype=call.cu_seqlens.dtype)
    prepare = build(
        target, PREPARE[target], H=call.H, g_dtype=types["g_dtype"], beta_dtype=types["beta_dtype"],
        **_heads(call), **activation(call),
    )  # fmt: skip
    slots = num_slots(call.B * call.T, call.N, packed)
    table_shape = (slots, call.HV, CHUNK_SIZE, columns(call.K, call.V).width)
    return Form(plan, prepare, _over_sequences("recurrence.recurrence", call), *types.values(), table_shape)


def _heads(call: KdaCall) -> dict[str, Any]:
    return {
        "HV": call.HV, "K": call.K, "V": call.V, "dtype": dtypes(call)["dtype"], "varlen": call.cu_seqlens is not None,
        "cu_dtype": torch.int32 if call.cu_seqlens is None else call.cu_seqlens.dtype,
    }  # fmt: skip


def _over_sequences(builder: str, call: KdaCall) -> Kernel:
    """A kernel that walks the chunks."""
    return build(
        target_for(call.q.device), builder, block_V=_block_V(call.N * call.HV, call.V, processors(call.q.device)),
        state_v_first=call.state_v_first, has_initial_state=call.initial_state is not None,
        has_final_state=call.output_final_state, **_heads(call),
    )  # fmt: skip


def _block_V(states: int, V: int, processors: int) -> int:
    """All of V where that occupies most processors, else a warpgroup's 64: a second tile reads all but u again."""
    return V if states >= 0.7 * processors else 64


def _prepare(call: KdaCall) -> Prepared:
    form = _form(call)
    q, k, v = aligned(call.q, form.dtype), aligned(call.k, form.dtype), aligned(call.v, form.dtype)
    g, beta = aligned(call.g, form.g_dtype), aligned(call.beta, form.beta_dtype)
    o = torch.empty_like(v)
    if form.plan is None:
        sequences = owners = (call.T,)
    else:
        cu_seqlens = call.cu_seqlens.contiguous()
        slot_seq = torch.empty(form.table_shape[0], dtype=torch.int32, device=q.device)
        order = torch.empty(call.N, dtype=torch.int32, device=q.device)
        form.plan(cu_seqlens, slot_seq, order, o)
        sequences, owners = (cu_seqlens, order), (cu_seqlens, slot_seq)
    table = q.new_empty(form.table_shape)
    decay = q.new_empty(form.table_shape[0], call.HV, call.K, dtype=torch.float32)
    form.prepare(q, k, v, g, beta, *gate(call), call.scale, *owners, table, decay)
    return Prepared(o, table, decay, sequences)


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


def _states(call: KdaCall) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The initial and the final state as arguments of a kernel; none where the call has none."""
    initial = () if call.initial_state is None else (aligned(call.initial_state, torch.float32),)
    final = ()
    if call.output_final_state:
        final = (call.q.new_empty(call.N, *call.state_shape, dtype=torch.float32),)
    return initial, final


def untouched(call: KdaCall) -> Tensor | None:
    """The states of a call of either operator without tokens."""
    if not call.output_final_state:
        return None
    if call.inplace_final_state:
        return call.initial_state
    if call.state_per_token:
        return call.q.new_empty(0, *call.state_shape, dtype=torch.float32)
    if call.initial_state is None:
        return call.q.new_zeros(call.N, *call.state_shape, dtype=torch.float32)
    if (indices := call.ssm_state_indices) is None:
        return call.initial_state.clone(memory_format=torch.contiguous_format)
    live = (indices > 0).view(-1, 1, 1, 1)
    return torch.where(live, call.initial_state[indices.clamp(min=0).long()], 0.0)


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
