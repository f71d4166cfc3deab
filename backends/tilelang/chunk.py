"""A call of chunk_kda on its way to its kernels: plan -> prepare (tables.py) -> carry; where that pays, its sequences
are cut into segments (split.py) before carry.

No tensor value is read here, so that a call can be captured in a CUDA graph; everything runs on the current stream.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from kda.backends.call import KdaCall
from kda.backends.environment import chunks_of_a_segment
from kda.golden.constants import CHUNK_SIZE

from .build import Kernel
from .chunk_table import parts
from .host import aligned, differentiated_in_bf16
from .split import Split, make_split, run_split
from .tables import Prepare, Tables, make_prepare, over_sequences, run_prepare

CHUNK_DELTA_H = "chunk_delta_h.chunk_delta_h"


class Launch(NamedTuple):
    """What a call's shapes, dtypes and options, and KDA_SPLIT, decide: computed once for all calls that share them."""

    prepare: Prepare
    split: Split | None  # of calls that are cut
    carry: Kernel


def chunk_kda(call: KdaCall) -> tuple[Tensor, Tensor | None]:
    """Run the call by the kernel that keeps no snapshots of the state."""
    o, state, _ = _run(call, with_ainv=False)
    return o, state


def chunk_kda_keeping(call: KdaCall) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Run the call, and hand out what spares `chunk_kda_backward` M1 to M3: the table, with Ainv, and the decay.

    Nothing of an fp16 call: its gradients are computed in bf16, and so are their tables.
    """
    keeps = not differentiated_in_bf16(call)
    o, state, t = _run(call, with_ainv=keeps)
    return o, state, (t.table, t.decay) if keeps else ()


def _run(call: KdaCall, *, with_ainv: bool) -> tuple[Tensor, Tensor | None, Tables]:
    key = (__name__, with_ainv, chunks_of_a_segment())
    if (launch := call.memo.get(key)) is None:
        launch = call.memo[key] = make_launch(call, with_ainv=with_ainv)
    with torch.cuda.device_of(call.q):
        o = call.v.new_empty(call.v.shape, dtype=launch.prepare.dtype)
        t = run_prepare(call, launch.prepare, o)
        initial, final = _states(call)
        walks = (*initial, *t.sequences) if launch.split is None else run_split(call, launch.split, t, initial)
        launch.carry(t.table, t.decay, *walks, o, *final)
    return o if o.dtype == call.v.dtype else o.to(call.v.dtype), final[0] if final else None, t


def make_launch(call: KdaCall, *, with_ainv: bool = False) -> Launch:
    """The kernels; with Ainv, which the forward pass doesn't read, the table serves the backward pass too."""
    prepare, split = make_prepare(call, with_ainv=with_ainv), make_split(call, with_ainv=with_ainv)
    starts = {"has_initial_state": call.initial_state is not None} if split is None else {"cut": True}
    states = {"has_final_state": call.output_final_state, **starts}
    return Launch(prepare, split, over_sequences(call, "carry.carry", with_ainv=with_ainv, **states))


def stages(call: KdaCall) -> dict[str, Tensor]:
    """The tables of M2 to M4 under the golden's names, chunk by chunk, by the kernel that keeps snapshots."""
    with torch.cuda.device_of(call.q):
        kernels = make_prepare(call, with_ainv=True)
        t = run_prepare(call, kernels, call.v.new_empty(call.v.shape, dtype=kernels.dtype))
        states = {"has_initial_state": call.initial_state is not None}
        h, v_new = snapshots(call, t, over_sequences(call, CHUNK_DELTA_H, **states))
    tables = parts(t.table, call.K, call.V) | {"decay": t.decay, "h": h.mT, "v_new": v_new}
    used = _used_entries(call)
    return {name: table[used] for name, table in tables.items()}


def snapshots(call: KdaCall, t: Tables, chunk_delta_h: Kernel) -> tuple[Tensor, Tensor]:
    """M4's h (transposed) and v_new of every chunk; the state after the last one is nobody's here."""
    entries = t.table.shape[0]
    h = t.table.new_empty(entries, call.HV, call.V, call.K)
    v_new = t.table.new_empty(entries, call.HV, CHUNK_SIZE, call.V)
    initial = () if call.initial_state is None else (aligned(call.initial_state, torch.float32),)
    chunk_delta_h(t.table, t.decay, *initial, *t.sequences, h, v_new)
    return h, v_new


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
