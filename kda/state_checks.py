"""The checks of a call's states: initial states, pools and their indices, and the tensors that the call writes to."""

from __future__ import annotations

import torch
from torch import Tensor

from kda.backends.call import DIFFERENTIABLE, WRITTEN, KdaCall, state_dtype
from kda.golden.constants import CHUNK_SIZE
from kda.require import FLOATS, INTS, require_device, require_dtype, require_shape, require_tensor, shape_of


def check_states(call: KdaCall) -> None:
    """What shapes, dtypes and devices can decide."""
    _check_state(call)
    _check_pool(call)
    _check_snapshots(call)
    _check_drafts(call)
    if call.null_slot not in (None, 0) or isinstance(call.null_slot, bool):
        raise ValueError(f"null_slot: expected 0 or None, got {call.null_slot!r}")


def check_written(call: KdaCall) -> None:
    """That the call may write where it is to; strides, inference mode and autograd can differ between calls alike."""
    written = [(name, x, name) for name in WRITTEN[call.op] if (x := getattr(call, name)) is not None]
    if call.inplace_final_state and call.initial_state is not None:
        written.append(("initial_state", call.initial_state, "inplace_final_state"))
    for name, x, asked_by in written:
        _check_writable(name, x, "" if name == asked_by else f" with {asked_by}")
        refuse_recording(asked_by, {name: getattr(call, name) for name in DIFFERENTIABLE})


def refuse_recording(asked_by: str, values: dict[str, Tensor | None]) -> None:
    """Raise ValueError if autograd would record a call with these arguments that writes to tensors of its caller."""
    if torch.is_grad_enabled():
        for name in DIFFERENTIABLE:
            if (x := values[name]) is not None and x.requires_grad:
                lost = (
                    "the state would be written over in" if asked_by == "inplace_final_state" else "it would not be in"
                )
                raise ValueError(f"{asked_by}: expected torch.no_grad() around it, got {name} that requires grad; "
                                 f"{lost} the autograd graph")  # fmt: skip


def _check_state(call: KdaCall) -> None:
    state = call.initial_state
    if state is None:
        if call.inplace_final_state:
            raise ValueError("inplace_final_state: expected an initial_state to write to, got initial_state=None")
        return
    _require(call, "initial_state", state, state_dtype(call.q.dtype), torch.bfloat16, torch.float16)
    tail = call.state_shape
    pooled = call.ssm_state_indices is not None
    first = max(state.shape[0], 1) if pooled and state.dim() else call.N  # a pool has one slot at least
    spelled = f"[{'slots' if pooled else 'N'}, {_layout(call)}]"
    if tuple(state.shape) == (first, tail[0], tail[2], tail[1]) and call.K != call.V:
        raise ValueError(f"initial_state: expected shape {spelled} = {[first, *tail]}, got {shape_of(state)}: "
                         f"that is the layout of state_v_first={not call.state_v_first}")  # fmt: skip
    require_shape("initial_state", state, (first, *tail), spelled)


def _check_pool(call: KdaCall) -> None:
    indices, accepted, has_initial = call.ssm_state_indices, call.num_accepted_tokens, call.has_initial_state
    if indices is not None:
        _require(call, "ssm_state_indices", indices, *INTS)
        if call.initial_state is None:
            raise ValueError("ssm_state_indices: expected a pool as initial_state, got initial_state=None")
        ranks, spelled = ((1, 2), "[N] or [N, S]") if call.op == "fused_recurrent_kda" else ((1,), "[N]")
        if indices.dim() not in ranks or indices.shape[0] != call.N:
            raise ValueError(f"ssm_state_indices: expected {spelled} with N = {call.N}, got {shape_of(indices)}")
        least = 1 if call.cu_seqlens is not None else max(call.T, 1)
        if indices.dim() == 2 and indices.shape[1] < least:
            raise ValueError(f"ssm_state_indices: expected [N, S] with S >= {least}, got {shape_of(indices)}")
    if accepted is not None:
        _require(call, "num_accepted_tokens", accepted, *INTS)
        if indices is None or indices.dim() != 2:
            raise ValueError("num_accepted_tokens: expected ssm_state_indices of shape [N, S] beside it, got "
                             f"{'None' if indices is None else shape_of(indices)}")  # fmt: skip
        require_shape("num_accepted_tokens", accepted, (call.N,), "[N]")
    if has_initial is not None:
        _require(call, "has_initial_state", has_initial, torch.bool)
        if call.initial_state is None:
            raise ValueError("has_initial_state: expected an initial_state beside it, got initial_state=None")
        require_shape("has_initial_state", has_initial, (call.N,), "[N]")


def _check_snapshots(call: KdaCall) -> None:
    offsets, states, chunks = call.checkpoint_offsets, call.checkpoint_states, call.chunk_states
    spelled = _layout(call)
    if (offsets is None) != (states is None):
        given, missing = ("offsets", "states") if states is None else ("states", "offsets")
        raise ValueError(f"checkpoint_{missing}: expected a tensor beside checkpoint_{given}, got None")
    if offsets is not None and states is not None:
        _require(call, "checkpoint_offsets", offsets, *INTS)
        require_shape("checkpoint_offsets", offsets, (call.N,), "[N]")
        _check_buffer("checkpoint_states", states, call, (call.N, *call.state_shape), f"[N, {spelled}]")
    if chunks is not None:
        if call.cu_seqlens is None:
            shape = (call.B, -(-call.T // CHUNK_SIZE), *call.state_shape)
            _check_buffer("chunk_states", chunks, call, shape, f"[B, ceil(T / {CHUNK_SIZE}), {spelled}]")
        else:
            rows = chunks.shape[0] if isinstance(chunks, Tensor) and chunks.dim() else 0
            _check_buffer("chunk_states", chunks, call, (rows, *call.state_shape), f"[chunks, {spelled}]")


def _check_drafts(call: KdaCall) -> None:
    buffer, rows = call.intermediate_states_buffer, call.intermediate_state_indices
    if buffer is not None:
        given = buffer.shape[:2] if isinstance(buffer, Tensor) and buffer.dim() == 5 else (call.N, call.T)
        sizes = [max(size, 1) for size in given]
        spelled = f"[rows, S, {_layout(call)}]"
        _check_buffer("intermediate_states_buffer", buffer, call, (*sizes, *call.state_shape), spelled)
        if (indices := call.ssm_state_indices) is not None and indices.dim() == 2:
            raise ValueError("intermediate_states_buffer: expected ssm_state_indices of shape [N] or None beside it, "
                             f"got {shape_of(indices)}")  # fmt: skip
    if rows is not None:
        _require(call, "intermediate_state_indices", rows, *INTS)
        if buffer is None:
            raise ValueError("intermediate_state_indices: expected an intermediate_states_buffer beside it, got None")
        require_shape("intermediate_state_indices", rows, (call.N,), "[N]")


def _require(call: KdaCall, name: str, x: Tensor, *dtypes: torch.dtype) -> None:
    """A tensor of one of the dtypes, on the call's device."""
    require_tensor(name, x)
    require_dtype(name, x, *dtypes)
    require_device(name, x, call.q)


def _layout(call: KdaCall) -> str:
    """The dimensions of one state, spelled."""
    return "HV, V, K" if call.state_v_first else "HV, K, V"


def _check_buffer(name: str, x: Tensor, call: KdaCall, shape: tuple[int, ...], spelled: str) -> None:
    _require(call, name, x, *FLOATS)
    require_shape(name, x, shape, spelled)


def _check_writable(name: str, x: Tensor, asked_by: str) -> None:
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{name}: expected a tensor that may be written{asked_by}, got one of "
                         "torch.inference_mode(), which only a call inside of it may write")  # fmt: skip
    if x.is_neg():
        raise ValueError(f"{name}: expected memory that holds its values{asked_by}, got a view "
                         "with the negative bit; resolve_neg() makes one")  # fmt: skip
    reach = 0  # of the axes with smaller strides: the next one must step over it
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ValueError(f"{name}: expected memory of its own for every element{asked_by}, "
                             f"got strides {list(x.stride())} for shape {shape_of(x)}")  # fmt: skip
        reach += (size - 1) * stride
