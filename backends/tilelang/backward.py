"""The gradient of a call of chunk_kda on its way to its kernels: M1 to M3 and the states once more, then dM4 to dM1.

    plan -> prepare -> chunk_delta_h and backward.carry, neither of which needs the other -> backward.prepare

The inputs come from the forward pass, and the chunk table where that has kept it (`chunk_kda_keeping`): prepare is then
left out. As there, no tensor value is read, and a call can be captured.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kda.backends.call import KdaCall
from kda.golden.constants import CHUNK_SIZE

from .build import Kernel, build, processors, target_for
from .chunk import CHUNK_DELTA_H, snapshots
from .host import aligned, differentiated_in_bf16, dtypes, gate
from .tables import KERNELS, NARROW, Prepare, block_V, make_prepare, over_sequences, raw, run_prepare


class Launch(NamedTuple):
    """What a call's shapes, dtypes and options decide: computed once for all calls that share them."""

    prepare: Prepare
    chunk_delta_h: Kernel
    carry: Kernel  # backwards, as is the next
    backward_prepare: Kernel
    side_by_side: bool  # whether two kernels that walk the chunks have room beside each other


def chunk_kda_backward(
    call: KdaCall, wanted: Collection[str], d_o: Tensor | None, d_final_state: Tensor | None, *kept: Tensor
) -> dict[str, Tensor]:
    """The gradients of the call's tensors that are wanted, in their dtypes, from those of o and of the final state.

    `kept` is what `chunk_kda_keeping` has handed out for this call, if that computed it.
    """
    original = call
    if differentiated_in_bf16(call):
        low = {name: getattr(call, name).bfloat16() for name in ("q", "k", "v")}
        call = replace(call, **low, memo=call.memo)
    states = {"has_d_final_state": d_final_state is not None, "has_d_initial_state": "initial_state" in wanted}
    key = (__name__, *states.values())
    if (launch := call.memo.get(key)) is None:
        launch = call.memo[key] = make_launch(call, **states)
    with torch.cuda.device_of(call.q):
        found = _run(call, launch, d_o, d_final_state, "initial_state" in wanted, kept)
    return {name: _like(found[name], getattr(original, name)) for name in wanted if name in found}


def make_launch(call: KdaCall, **states: bool) -> Launch:
    """The kernels; `states` says which of the states' gradients come in and go out."""
    types = dtypes(call)
    gradients = {"K": call.K, "g_dtype": types["g_dtype"], "beta_dtype": types["beta_dtype"]}
    # The longest sequence of a packed call is walked long after the others: half as long by tiles half as wide.
    columns = block_V(call) if call.cu_seqlens is None else NARROW
    blocks = call.N * call.HV * call.V // columns
    return Launch(
        make_prepare(call, with_ainv=True, **gradients),
        over_sequences(call, CHUNK_DELTA_H, columns, has_initial_state=call.initial_state is not None),
        over_sequences(call, "backward.carry.carry", columns, **states),
        build(target_for(call.q.device), f"{KERNELS}.backward.prepare.prepare", **raw(call)),
        2 * blocks <= processors(call.q.device),
    )


def _run(
    call: KdaCall,
    launch: Launch,
    d_o: Tensor | None,
    d_final_state: Tensor | None,
    initial: bool,
    kept: tuple[Tensor, ...],
) -> dict[str, Tensor]:
    types = launch.prepare
    new, heads = call.q.new_empty, (call.B, call.T, call.HV)
    dq, dk = (new(*heads, call.K, dtype=types.dtype) for _ in range(2))
    dv = new(*heads, call.V, dtype=types.dtype)
    dg, dbeta = new(*heads, call.K, dtype=types.g_dtype), new(*heads, dtype=types.beta_dtype)
    d_o = torch.zeros_like(dv) if d_o is None else aligned(d_o.view(dv.shape), types.dtype)

    t = run_prepare(call, launch.prepare, dv, dq, dk, dg, dbeta, kept=kept)
    entries = t.table.shape[0]
    dh = t.table.new_empty(entries, call.HV, call.V, call.K)
    ndb = t.table.new_empty(entries, call.HV, CHUNK_SIZE, call.V)
    final = () if d_final_state is None else (aligned(d_final_state, torch.float32),)
    d_initial = [new(call.N, *call.state_shape, dtype=torch.float32)] if initial else []
    arguments = (t.table, t.decay, d_o, *final, *t.sequences, dh, ndb, *d_initial)
    if launch.side_by_side:  # the other stream launches alone: what it writes is this one's memory
        here, side = torch.cuda.current_stream(), _side_stream(call.q.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            launch.carry(*arguments)
        h, v_new = snapshots(call, t, launch.chunk_delta_h)
        here.wait_stream(side)
    else:
        launch.carry(*arguments)
        h, v_new = snapshots(call, t, launch.chunk_delta_h)
    dgate = [new(entries, call.HV, 2, call.K, dtype=torch.float32)] if call.use_gate_in_kernel else []
    gradients = (dq, dk, dv, dg, dbeta, *dgate)
    launch.backward_prepare(*t.tokens, *gate(call), call.scale, *t.owners, d_o, h, dh, v_new, ndb, *gradients)

    found = {"q": _over_group(dq, call), "k": _over_group(dk, call), "v": dv, "g": dg, "beta": dbeta}
    if dgate:
        sums = dgate[0].sum(0)
        found |= {"dt_bias": sums[:, 0], "A_log": sums[:, 1].sum(-1)}
    return found | ({"initial_state": d_initial[0]} if initial else {})


def _over_group(x: Tensor, call: KdaCall) -> Tensor:
    """The sum over the value heads that share a head."""
    return x if call.HV == call.H else x.unflatten(2, (call.H, -1)).sum(3)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _like(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient in x's dtype and shape."""
    if gradient.dtype != x.dtype:
        gradient = gradient.to(x.dtype)
    return gradient if gradient.shape == x.shape else gradient.reshape(x.shape)
