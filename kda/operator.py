"""`kda::chunk_kda`, a call as one torch operator.

torch.compile traces it as a single node; and a backend without a backward pass gets its gradient here: the torch
backend computes the call once more and differentiates that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda import backends
from kda.backends.call import KdaCall, state_dtype
from kda.normalise import normalise

ARGUMENTS = (
    "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "A_log", "dt_bias", "lower_bound",
    "cu_seqlens", "state_v_first", "backend",
)  # fmt: skip
"""The arguments of `kda.chunk_kda`, in its order."""


@torch.library.custom_op(
    "kda::chunk_kda",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale, Tensor? initial_state, "
    "bool output_final_state, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, bool use_beta_sigmoid_in_kernel, "
    "bool allow_neg_eigval, Tensor? A_log, Tensor? dt_bias, float? lower_bound, Tensor? cu_seqlens, "
    "bool state_v_first, str? backend) -> (Tensor, Tensor)",
)
def chunk_kda(*arguments: Any) -> tuple[Tensor, Tensor]:
    """`kda.chunk_kda` with all its arguments by position; an empty tensor stands for a final state not asked for."""
    call, backend = _normalised(arguments)
    o, state = backends.select(call, backend).chunk_kda(call)
    return o.view(arguments[2].shape), call.q.new_empty(0) if state is None else state


@chunk_kda.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    call, _ = _normalised(arguments)
    o = torch.empty_like(arguments[2], memory_format=torch.contiguous_format)
    if not call.output_final_state:
        return o, call.q.new_empty(0)
    size = (call.V, call.K) if call.state_v_first else (call.K, call.V)
    return o, call.q.new_empty(call.N, call.HV, *size, dtype=state_dtype(call.q.dtype))


def _normalised(arguments: tuple[Any, ...]) -> tuple[KdaCall, str | None]:
    named = dict(zip(ARGUMENTS, arguments, strict=True))
    backend = named.pop("backend")
    return normalise("chunk_kda", **named), backend


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.inputs = [None if isinstance(x, Tensor) else (x,) for x in inputs]


def _backward(ctx: Any, grad_o: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
    saved = iter(ctx.saved_tensors)
    arguments = [
        next(saved).detach().requires_grad_(needed) if kept is None else kept[0]
        for kept, needed in zip(ctx.inputs, ctx.needs_input_grad, strict=True)
    ]
    with torch.enable_grad():
        call, _ = _normalised(arguments)
        o, state = backends.load("torch").chunk_kda(call)
    outputs, grads = [o], [grad_o.view(o.shape)]
    if state is not None:
        outputs.append(state)
        grads.append(grad_state)
    wanted = [x for x, needed in zip(arguments, ctx.needs_input_grad, strict=True) if needed]
    found = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)


chunk_kda.register_autograd(_backward, setup_context=_save)
