"""M1 to M3 of a call: its tokens as the kernels take them, and the chunk table that prepare makes of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda.backends.call import KdaCall
from kda.golden.constants import CHUNK_SIZE

from .build import CPU, HOPPER, Kernel, build, processors, target_for
from .chunk_table import columns, num_entries
from .host import activation, aligned, dtypes, gate

KERNELS = f"{__package__}.kernels"

PREPARE = {CPU: f"{KERNELS}.prepare.prepare", HOPPER: f"{KERNELS}.sm90.prepare.prepare"}
"""prepare's twins."""

NARROW = 64
"""Columns of V that a warpgroup has in registers."""


class Prepare(NamedTuple):
    """What a call's shapes, dtypes and options decide about M1 to M3."""

    plan: Kernel | None  # of packed calls
    prepare: Kernel
    shape: tuple[int, ...]  # of the table
    dtype: torch.dtype  # of q, k, v and the table
    g_dtype: torch.dtype
    beta_dtype: torch.dtype


class Tables(NamedTuple):
    """A call after M1 to M3, and the arguments by which the kernels that follow find its sequences."""

    tokens: tuple[Tensor, ...]  # q, k, v, g and beta: contiguous, in the kernels' dtypes
    table: Tensor  # [entries, HV, C, width]: qg, kg, w, u, Aqk and perhaps Ainv
    decay: Tensor  # [entries, HV, K] fp32
    sequences: tuple[Any, ...]  # cu_seqlens and their order, or the length of all
    owners: tuple[Any, ...]  # cu_seqlens and each entry's sequence, or the length of all


def make_prepare(call: KdaCall, *, with_ainv: bool, **gradients: Any) -> Prepare:
    """The kernels of M1 to M3; `gradients` are `plan`'s parameters for the backward pass."""
    target, types = target_for(call.q.device), dtypes(call)
    plan = None
    if call.cu_seqlens is not None:
        options = {"HV": call.HV, "V": call.V, "dtype": types["dtype"], "cu_dtype": call.cu_seqlens.dtype}
        plan = build(target, f"{KERNELS}.plan.plan", **options, **gradients)
    prepare = build(target, PREPARE[target], with_ainv=with_ainv, **raw(call))
    entries = num_entries(call.B * call.T, call.N, call.cu_seqlens is not None)
    shape = (entries, call.HV, CHUNK_SIZE, columns(call.K, call.V, with_ainv=with_ainv).width)
    return Prepare(plan, prepare, shape, **types)


def run_prepare(call: KdaCall, kernels: Prepare, *cleared: Tensor, kept: tuple[Tensor, ...] = ()) -> Tables:
    """M1 to M3. In a packed call, `cleared` (what comes out per token) becomes 0 outside of all sequences.

    `kept` is the table and the decay where an earlier run of these kernels has left them; they are not computed again.
    """
    q, k, v = aligned(call.q, kernels.dtype), aligned(call.k, kernels.dtype), aligned(call.v, kernels.dtype)
    g, beta = aligned(call.g, kernels.g_dtype), aligned(call.beta, kernels.beta_dtype)
    sequences: tuple[Any, ...]
    owners: tuple[Any, ...]
    if call.cu_seqlens is None or kernels.plan is None:
        sequences = owners = (call.T,)
    else:
        cu_seqlens = call.cu_seqlens.contiguous()
        owner = torch.empty(kernels.shape[0], dtype=torch.int32, device=q.device)
        order = torch.empty(call.N, dtype=torch.int32, device=q.device)
        kernels.plan(cu_seqlens, owner, order, *cleared)
        sequences, owners = (cu_seqlens, order), (cu_seqlens, owner)
    if kept:
        table, decay = kept
    else:
        table = q.new_empty(kernels.shape)
        decay = q.new_empty(kernels.shape[0], call.HV, call.K, dtype=torch.float32)
        kernels.prepare(q, k, v, g, beta, *gate(call), call.scale, *owners, table, decay)
    return Tables((q, k, v, g, beta), table, decay, sequences, owners)


def raw(call: KdaCall) -> dict[str, Any]:
    """Parameters of a kernel that reads the call's own tokens."""
    types = dtypes(call)
    return {
        "H": call.H,
        "g_dtype": types["g_dtype"],
        "beta_dtype": types["beta_dtype"],
        **heads(call),
        **activation(call),
    }


def heads(call: KdaCall) -> dict[str, Any]:
    """Parameters of every kernel."""
    return {
        "HV": call.HV, "K": call.K, "V": call.V, "dtype": dtypes(call)["dtype"], "varlen": call.cu_seqlens is not None,
        "cu_dtype": torch.int32 if call.cu_seqlens is None else call.cu_seqlens.dtype,
    }  # fmt: skip


def over_sequences(call: KdaCall, builder: str, columns: int | None = None, **options: bool) -> Kernel:
    """A kernel that walks the chunks, by default with `block_V` columns of V in a block.

    `options` are its own, such as which states it reads and writes.
    """
    return build(
        target_for(call.q.device), f"{KERNELS}.{builder}", state_v_first=call.state_v_first,
        block_V=block_V(call) if columns is None else columns, **options, **heads(call),
    )  # fmt: skip


def block_V(call: KdaCall) -> int:
    """All of V where that occupies most processors, else a warpgroup's: a second tile reads all but u again."""
    return call.V if 0.7 * processors(call.q.device) <= call.N * call.HV else NARROW
