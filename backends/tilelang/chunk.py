"""A call of chunk_kda on its way to its kernels: the chunk table in memory, then plan -> prepare -> carry.

No tensor value is read here, so that a call can be captured in a CUDA graph; everything runs on the current stream.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda.backends.call import KdaCall
from kda.golden.constants import CHUNK_SIZE

from .build import CPU, HOPPER, Kernel, build, processors, target_for
from .chunk_table import columns, num_entries, parts
from .host import activation, aligned, dtypes, gate

_KERNELS = f"{__package__}.kernels"

PREPARE = {CPU: f"{_KERNELS}.prepare.prepare", HOPPER: f"{_KERNELS}.sm90.prepare.prepare"}
"""prepare's twins."""


class Launch(NamedTuple):
    """What a call's shapes, dtypes and options decide: computed once for all calls that share them."""

    plan: Kernel | None  # of packed calls
    prepare: Kernel
    carry: Kernel
    table_shape: tuple[int, ...]
    dtype: torch.dtype  # of q, k, v and the table
    g_dtype: torch.dtype
    beta_dtype: torch.dtype


class Prepared(NamedTuple):
    """A call after M1 to M3: its tables, and the arguments by which the kernels that follow find its sequences."""

    o: Tensor  # [B, T, HV, V], still empty but for its padding rows, which are 0
    table: Tensor  # [entries, HV, C, width]: qg, kg, w, u and Aqk
    decay: Tensor  # [entries, HV, K] fp32
    sequences: tuple[Any, ...]  # cu_seqlens and their order, or the length of all


def chunk_kda(call: KdaCall) -> tuple[Tensor, Tensor | None]:
    """Run the call by the kernel that keeps no snapshots of the state."""
    with torch.cuda.device_of(call.q):
        p = _prepare(call)
        initial, final = _states(call)
        _launch(call).carry(p.table, p.decay, *initial, *p.sequences, p.o, *final)
    o = p.o if p.o.dtype == call.v.dtype else p.o.to(call.v.dtype)
    return o, final[0] if final else None


def stages(call: KdaCall) -> dict[str, Tensor]:
    """The tables of M2 to M4 under the golden's names, chunk by chunk, by the kernel that keeps snapshots."""
    with torch.cuda.device_of(call.q):
        p = _prepare(call)
        entries = p.table.shape[0]
        h = p.table.new_empty(entries, call.HV, call.V, call.K)
        v_new = p.table.new_empty(entries, call.HV, CHUNK_SIZE, call.V)
        initial, final = _states(call)
        chunk_delta_h = _over_sequences("chunk_delta_h.chunk_delta_h", call)
        chunk_delta_h(p.table, p.decay, *initial, *p.sequences, h, v_new, *final)
    tables = parts(p.table, call.K, call.V) | {"decay": p.decay, "h": h.mT, "v_new": v_new}
    used = _used_entries(call)
    return {name: table[used] for name, table in tables.items()}


def _launch(call: KdaCall) -> Launch:
    if (launch := call.memo.get(__name__)) is None:
        launch = call.memo[__name__] = make_launch(call)
    return launch


def make_launch(call: KdaCall) -> Launch:
    target, types, packed = target_for(call.q.device), dtypes(call), call.cu_seqlens is not None
    plan = None
    if call.cu_seqlens is not None:
        options = {"HV": call.HV, "V": call.V, "dtype": types["dtype"], "cu_dtype": call.cu_seqlens.dtype}
        plan = build(target, f"{_KERNELS}.plan.plan", **options)
    prepare = build(
        target, PREPARE[target], H=call.H, g_dtype=types["g_dtype"], beta_dtype=types["beta_dtype"],
        **_heads(call), **activation(call),
    )  # fmt: skip
    entries = num_entries(call.B * call.T, call.N, packed)
    table_shape = (entries, call.HV, CHUNK_SIZE, columns(call.K, call.V).width)
    return Launch(plan, prepare, _over_sequences("carry.carry", call), table_shape, **types)


def _heads(call: KdaCall) -> dict[str, Any]:
    return {
        "HV": call.HV, "K": call.K, "V": call.V, "dtype": dtypes(call)["dtype"], "varlen": call.cu_seqlens is not None,
        "cu_dtype": torch.int32 if call.cu_seqlens is None else call.cu_seqlens.dtype,
    }  # fmt: skip


def _over_sequences(builder: str, call: KdaCall) -> Kernel:
    """A kernel that walks the chunks."""
    return build(
        target_for(call.q.device), f"{_KERNELS}.{builder}", state_v_first=call.state_v_first,
        block_V=_block_V(call.N * call.HV, call.V, processors(call.q.device)),
        has_initial_state=call.initial_state is not None, has_final_state=call.output_final_state, **_heads(call),
    )  # fmt: skip


def _block_V(states: int, V: int, processors: int) -> int:
    """All of V where that occupies most processors, else a warpgroup's 64: a second tile reads all but u again."""
    return V if states >= 0.7 * processors else 64


def _prepare(call: KdaCall) -> Prepared:
    launch = _launch(call)
    q, k, v = aligned(call.q, launch.dtype), aligned(call.k, launch.dtype), aligned(call.v, launch.dtype)
    g, beta = aligned(call.g, launch.g_dtype), aligned(call.beta, launch.beta_dtype)
    o = torch.empty_like(v)
    sequences: tuple[Any, ...]
    owners: tuple[Any, ...]
    if call.cu_seqlens is None or launch.plan is None:
        sequences = owners = (call.T,)
    else:
        cu_seqlens = call.cu_seqlens.contiguous()
        owner = torch.empty(launch.table_shape[0], dtype=torch.int32, device=q.device)
        order = torch.empty(call.N, dtype=torch.int32, device=q.device)
        launch.plan(cu_seqlens, owner, order, o)
        sequences, owners = (cu_seqlens, order), (cu_seqlens, owner)
    table = q.new_empty(launch.table_shape)
    decay = q.new_empty(launch.table_shape[0], call.HV, call.K, dtype=torch.float32)
    launch.prepare(q, k, v, g, beta, *gate(call), call.scale, *owners, table, decay)
    return Prepared(o, table, decay, sequences)


def _states(call: KdaCall) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The initial and the final state as arguments of a kernel; none where the call has none."""
    initial = () if call.initial_state is None else (aligned(call.initial_state, torch.float32),)
    final: tuple[Tensor, ...] = ()
    if call.output_final_state:
        final = (call.q.new_empty(call.N, *call.state_shape, dtype=torch.float32),)
    return initial, final


def _used_entries(call: KdaCall) -> Tensor:
    """The entries that hold chunks, in order. Reads cu_seqlens: for the stages only."""
    if call.cu_seqlens is None:
        return torch.arange(call.N * -(-call.T // CHUNK_SIZE), device=call.q.device)
    entries = [
        bos // CHUNK_SIZE + n + i
        for n, (bos, eos) in enumerate(itertools.pairwise(call.cu_seqlens.tolist()))
        for i in range(-(-(eos - bos) // CHUNK_SIZE))
    ]
    return torch.tensor(entries, dtype=torch.long, device=call.q.device)
