"""A call of fused_recurrent_kda on its way to its one kernel: what it is built for, its outputs, its states' strides.

No tensor value is read here, so that a call can be captured in a CUDA graph; everything runs on the current stream.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda.backends.call import KdaCall

from .build import Kernel, build, processors, target_for
from .host import activation, aligned, dtypes, gate


class Launch(NamedTuple):
    """What a call's shapes, dtypes and options decide: computed once for all calls that share them."""

    kernel: Kernel
    final_shape: tuple[int, ...] | None  # of the new tensor of states, if there is to be one
    state_dtype: torch.dtype
    dtype: torch.dtype  # of q, k, v
    g_dtype: torch.dtype
    beta_dtype: torch.dtype


def fused_recurrent_kda(call: KdaCall) -> tuple[Tensor, Tensor | None]:
    """Run the call: o `[B, T, HV, V]`, and the states as the ABI has them, in place or new."""
    state, buffer = call.initial_state, call.intermediate_states_buffer
    if call.q.device.type == "cpu" and torch.bfloat16 in _written_dtypes(call):
        return _without_bf16(call)
    if state is not None and state.is_neg():  # not one to write to: the front end sees to that
        state = state.resolve_neg()
    quads = None if state is None else quads_of(state)
    launch = _launch(call, gaps=state is not None and quads is None)
    with torch.cuda.device_of(call.q):
        q, k, v = by_token(call.q, launch.dtype), by_token(call.k, launch.dtype), by_token(call.v, launch.dtype)
        g, beta = by_token(call.g, launch.g_dtype), by_token(call.beta, launch.beta_dtype)
        o = torch.empty_like(v, memory_format=torch.contiguous_format) if (x := _written(call, v)) is None else x
        final = None if launch.final_shape is None else q.new_empty(launch.final_shape, dtype=launch.state_dtype)
        lengths = call.T if call.cu_seqlens is None else call.cu_seqlens.contiguous()
        states = () if state is None else (state, *state.stride()) if quads is None else (state, quads)
        slots = [x.contiguous() for x in (call.ssm_state_indices, call.num_accepted_tokens) if x is not None]
        outputs = (o,) if final is None else (o, final)
        drafts = () if buffer is None else _drafts(call, buffer)
        inputs = q, k, v, g, beta
        strides = [stride for x in inputs for stride in x.stride()[:2]]
        launch.kernel(*inputs, *strides, *gate(call), call.scale, lengths, *states, *slots, *outputs, *drafts)
        if buffer is not None and not buffer.is_contiguous():
            buffer.copy_(drafts[0].view_as(buffer))
    if call.inplace_final_state:
        final = state if call.output_final_state else None
    return o if o.dtype == call.v.dtype else o.to(call.v.dtype), final


def _written_dtypes(call: KdaCall) -> set[torch.dtype]:
    """Of the states in memory."""
    return {x.dtype for x in (call.initial_state, call.intermediate_states_buffer) if x is not None}


def _without_bf16(call: KdaCall) -> tuple[Tensor, Tensor | None]:
    """The same on a CPU, whose kernels know no bf16: on copies of the states in fp32."""
    state, buffer = call.initial_state, call.intermediate_states_buffer
    given = {"initial_state": state, "intermediate_states_buffer": buffer}
    wide: dict[str, Any] = {name: None if x is None else x.float() for name, x in given.items()}
    o, final = fused_recurrent_kda(replace(call, **wide, memo={}))
    if buffer is not None:
        buffer.copy_(wide["intermediate_states_buffer"])
    if state is not None and call.inplace_final_state:
        state.copy_(wide["initial_state"])
        return o, state if call.output_final_state else None
    return o, None if final is None else final.to(call.final_dtype)


def _drafts(call: KdaCall, buffer: Tensor) -> tuple[Any, ...]:
    """The buffer for each token's state as arguments of the kernel: dense, so a copy of one with gaps."""
    rows = call.intermediate_state_indices
    return buffer.contiguous().flatten(0, 1), buffer.shape[1], *(() if rows is None else (rows.contiguous(),))


def by_token(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as it lies where each token's heads lie side by side, as in a view of one packed projection; else a copy."""
    tail = x.shape[2:]
    side_by_side = x.stride()[2:] == (tail[1], 1) if len(tail) == 2 else x.stride(2) == 1
    if side_by_side and x.dtype == dtype and not x.is_neg() and x.data_ptr() % 16 == 0:
        return x
    return aligned(x, dtype)


def _written(call: KdaCall, v: Tensor) -> Tensor | None:
    """The caller's tensor for o, if the kernel can write to it."""
    out = call.out
    return None if out is None or out.dtype != v.dtype or not out.is_contiguous() or out.data_ptr() % 16 else out


def quads_of(state: Tensor) -> int | None:
    """How far slots lie apart, in units of four elements; None where their rows have gaps or can't be read by fours."""
    size = state.shape[2] * state.shape[3]
    dense = state.is_contiguous() or state.stride()[1:] == (size, state.shape[3], 1)
    quads, rest = divmod(state.stride(0), 4)
    return None if not dense or rest or state.data_ptr() % (4 * state.itemsize) else quads


def _launch(call: KdaCall, gaps: bool) -> Launch:
    key = (__name__, gaps)  # strides and addresses are no part of what calls that share a memo have in common
    if (launch := call.memo.get(key)) is None:
        launch = call.memo[key] = make_launch(call, gaps)
    return launch


def make_launch(call: KdaCall, gaps: bool) -> Launch:
    types, indices, accepted = dtypes(call), call.ssm_state_indices, call.num_accepted_tokens
    state_dtype, drafts, draft_rows = call.final_dtype, call.intermediate_states_buffer, call.intermediate_state_indices
    new_states = call.output_final_state and not call.inplace_final_state
    kernel = build(
        target_for(call.q.device), f"{__package__}.kernels.recurrent.fused_recurrent",
        H=call.H, HV=call.HV, K=call.K, V=call.V,
        cu_dtype=None if call.cu_seqlens is None else call.cu_seqlens.dtype, state_v_first=call.state_v_first,
        has_initial_state=call.initial_state is not None, has_final_state=new_states, inplace=call.inplace_final_state,
        state_dtype=state_dtype, gaps=gaps, slot_dtype=None if indices is None else indices.dtype,
        slots_per_token=call.state_per_token, first_slot=call.first_slot,
        drafts_dtype=None if drafts is None else drafts.dtype,
        draft_rows_dtype=None if draft_rows is None else draft_rows.dtype,
        accepted_dtype=None if accepted is None else accepted.dtype,
        block_V=_block_V(call.N * call.HV, call.V, processors(call.q.device)), **types, **activation(call),
    )  # fmt: skip
    states = call.B * call.T if call.state_per_token else call.N
    return Launch(kernel, (states, *call.state_shape) if new_states else None, state_dtype, **types)


def _block_V(states: int, V: int, processors: int) -> int:
    """The widest tile of V with at least four blocks a processor: narrower ones load q, k and g more often."""
    width = 64
    while width > 16 and states * (V // width) < 4 * processors:
        width //= 2
    return width
