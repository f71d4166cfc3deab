"""A call of fused_recurrent_kda on its way to its one kernel: what it is built for, its outputs, its states' strides.

No tensor value is read here, so that a call can be captured in a CUDA graph; everything runs on the current stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kda.backends.call import KdaCall

from .build import CPU, build, dtype_name, processors, target_for
from .launch import gate, rows


class Form(NamedTuple):
    """What a call's shapes, dtypes and options decide: computed once for all calls that share them."""

    kernel: Callable[..., None]
    dtype: torch.dtype
    g_dtype: torch.dtype
    beta_dtype: torch.dtype
    final_shape: tuple[int, ...] | None  # of the new tensor of states, if there is to be one


def fused_recurrent_kda(call: KdaCall) -> tuple[Tensor, Tensor | None]:
    """Run the call: o `[B, T, HV, V]`, and the states as the ABI has them, in place or new."""
    if call.N == 0 or call.T == 0:
        return torch.zeros_like(call.v), _untouched(call)
    state = call.initial_state
    strides = () if state is None else _strides(state)
    form = _form(call, gaps=len(strides) == 4)
    with torch.cuda.device_of(call.q):
        q, k, v = rows(call.q, form.dtype), rows(call.k, form.dtype), rows(call.v, form.dtype)
        g, beta = rows(call.g, form.g_dtype), rows(call.beta, form.beta_dtype)
        o = torch.empty_like(v)
        final = None if form.final_shape is None else q.new_empty(form.final_shape, dtype=torch.float32)
        lengths = call.T if call.cu_seqlens is None else call.cu_seqlens.contiguous()
        slots = [x.contiguous() for x in (call.ssm_state_indices, call.num_accepted_tokens) if x is not None]
        states = () if state is None else (state, *strides)
        outputs = (o,) if final is None else (o, final)
        form.kernel(q, k, v, g, beta, *gate(call), call.scale, lengths, *states, *slots, *outputs)
    if call.inplace_final_state:
        final = state if call.output_final_state else None
    return o if o.dtype == call.v.dtype else o.to(call.v.dtype), final


def _strides(state: Tensor) -> tuple[int, ...]:
    """How far slots lie apart, in units of four elements, where each can be read four at a time; else all strides."""
    size = state.shape[2] * state.shape[3]
    dense = state.is_contiguous() or state.stride()[1:] == (size, state.shape[3], 1)
    quads, rest = divmod(state.stride(0), 4)
    return state.stride() if not dense or rest or state.data_ptr() % 16 else (quads,)


def _form(call: KdaCall, gaps: bool) -> Form:
    key = (__name__, gaps)
    if (form := call.memo.get(key)) is None:
        form = call.memo[key] = _make_form(call, gaps)
    return form


def _make_form(call: KdaCall, gaps: bool) -> Form:
    target = target_for(call.q.device)
    dtypes = [torch.float32] * 3 if target == CPU else [call.q.dtype, call.g.dtype, call.beta.dtype]
    indices, accepted = call.ssm_state_indices, call.num_accepted_tokens
    per_token = indices is not None and indices.dim() == 2
    new_states = call.output_final_state and not call.inplace_final_state
    kernel = build(
        target, "fused_recurrent.fused_recurrent", H=call.H, HV=call.HV, K=call.K, V=call.V,
        dtype=dtype_name(dtypes[0]), g_dtype=dtype_name(dtypes[1]), beta_dtype=dtype_name(dtypes[2]),
        cu_dtype=None if call.cu_seqlens is None else dtype_name(call.cu_seqlens.dtype),
        use_qk_l2norm=call.use_qk_l2norm_in_kernel, use_gate=call.use_gate_in_kernel,
        bounded_gate=call.lower_bound is not None, use_beta_sigmoid=call.use_beta_sigmoid_in_kernel,
        allow_neg_eigval=call.allow_neg_eigval, state_v_first=call.state_v_first,
        has_initial_state=call.initial_state is not None, has_final_state=new_states, inplace=call.inplace_final_state,
        gaps=gaps, slot_dtype=None if indices is None else dtype_name(indices.dtype), slots_per_token=per_token,
        accepted_dtype=None if accepted is None else dtype_name(accepted.dtype),
        block_V=64 if target == CPU else _block_V(call.N * call.HV, call.V, processors(call.q.device)),
    )  # fmt: skip
    state = (call.V, call.K) if call.state_v_first else (call.K, call.V)
    final_shape = (call.B * call.T if per_token else call.N, call.HV, *state) if new_states else None
    return Form(kernel, *dtypes, final_shape)


def _block_V(states: int, V: int, processors: int) -> int:
    """The widest tile of V with at least four blocks a processor: narrower ones load q, k and g more often."""
    width = 64
    while width > 16 and states * (V // width) < 4 * processors:
        width //= 2
    return width


def _untouched(call: KdaCall) -> Tensor | None:
    """The states of a call without tokens."""
    if not call.output_final_state:
        return None
    if call.inplace_final_state:
        return call.initial_state
    state = (call.V, call.K) if call.state_v_first else (call.K, call.V)
    indices = call.ssm_state_indices
    if indices is not None and indices.dim() == 2:
        return call.q.new_empty(0, call.HV, *state, dtype=torch.float32)
    if call.initial_state is None:
        return call.q.new_zeros(call.N, call.HV, *state, dtype=torch.float32)
    if indices is None:
        return call.initial_state.clone(memory_format=torch.contiguous_format)
    live = (indices > 0).view(-1, 1, 1, 1)
    return torch.where(live, call.initial_state[indices.clamp(min=0).long()], 0.0)
