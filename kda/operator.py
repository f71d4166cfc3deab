"""The calls as torch operators: `kda::chunk_kda`, `kda::fused_recurrent_kda`, and `kda::fused_recurrent_kda_` in place.

torch.compile traces each as a single node; and a backend without a backward pass gets its gradient here: the torch
backend computes the call once more and differentiates that.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor

from kda import backends
from kda.backends.call import KdaCall, state_dtype
from kda.normalise import normalise

CHUNK_ARGUMENTS = {
    "q": "Tensor", "k": "Tensor", "v": "Tensor", "g": "Tensor", "beta": "Tensor", "scale": "float?",
    "initial_state": "Tensor?", "output_final_state": "bool", "use_qk_l2norm_in_kernel": "bool",
    "use_gate_in_kernel": "bool", "use_beta_sigmoid_in_kernel": "bool", "allow_neg_eigval": "bool", "A_log": "Tensor?",
    "dt_bias": "Tensor?", "lower_bound": "float?", "cu_seqlens": "Tensor?", "state_v_first": "bool", "backend": "str?",
}  # fmt: skip
"""The arguments of `kda.chunk_kda` in their order, with their types in the operator's schema."""

RECURRENT_ARGUMENTS = CHUNK_ARGUMENTS | {"ssm_state_indices": "Tensor?", "num_accepted_tokens": "Tensor?"}
"""The same of `kda.fused_recurrent_kda`, but for `inplace_final_state`: each answer to it is an operator of its own."""

INPLACE_ARGUMENTS = RECURRENT_ARGUMENTS | {"initial_state": "Tensor(a!)"}


ARGUMENTS = {"chunk_kda": CHUNK_ARGUMENTS, "fused_recurrent_kda": RECURRENT_ARGUMENTS}

Op = Literal["chunk_kda", "fused_recurrent_kda"]


def _schema(arguments: dict[str, str], returns: str) -> str:
    return f"({', '.join(f'{kind} {name}' for name, kind in arguments.items())}) -> {returns}"


@torch.library.custom_op("kda::chunk_kda", mutates_args=(), schema=_schema(CHUNK_ARGUMENTS, "(Tensor, Tensor)"))
def chunk_kda(*values: Any) -> tuple[Tensor, Tensor]:
    """`kda.chunk_kda` with all its arguments by position; an empty tensor stands for a final state not asked for."""
    call, backend = _normalised("chunk_kda", values)
    return _outputs(call, values, *backends.select(call, backend).chunk_kda(call))


@torch.library.custom_op(
    "kda::fused_recurrent_kda", mutates_args=(), schema=_schema(RECURRENT_ARGUMENTS, "(Tensor, Tensor)")
)
def fused_recurrent_kda(*values: Any) -> tuple[Tensor, Tensor]:
    """The same of `kda.fused_recurrent_kda`, where it returns new states."""
    call, backend = _normalised("fused_recurrent_kda", values)
    return _outputs(call, values, *backends.select(call, backend).fused_recurrent_kda(call))


@torch.library.custom_op(
    "kda::fused_recurrent_kda_", mutates_args=("initial_state",), schema=_schema(INPLACE_ARGUMENTS, "Tensor")
)
def fused_recurrent_kda_(*values: Any) -> Tensor:
    """`kda.fused_recurrent_kda` with `inplace_final_state`: o alone."""
    call, backend = _normalised("fused_recurrent_kda", values, inplace_final_state=True)
    return _outputs(call, values, *backends.select(call, backend).fused_recurrent_kda(call))[0]


def _normalised(op: Op, values: tuple[Any, ...], **inplace: bool) -> tuple[KdaCall, str | None]:
    named = dict(zip(ARGUMENTS[op], values, strict=True))
    backend = named.pop("backend")
    return normalise(op, **named, **inplace), backend


def _outputs(call: KdaCall, values: tuple[Any, ...], o: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    if values[2].dim() == 3:  # as the caller gave v, so o comes back
        o = o.squeeze_(0)
    # A view could not be modified in place by a caller for whom autograd records.
    return o.clone() if o._is_view() else o, call.q.new_empty(0) if state is None else state


def _fake(op: Op, *values: Any) -> tuple[Tensor, Tensor]:
    call, _ = _normalised(op, values)
    o = torch.empty_like(values[2], memory_format=torch.contiguous_format)
    if not call.output_final_state:
        return o, call.q.new_empty(0)
    states = call.B * call.T if call.state_per_token else call.N
    return o, call.q.new_empty(states, *call.state_shape, dtype=state_dtype(call.q.dtype))


@fused_recurrent_kda_.register_fake
def _(*values: Any) -> Tensor:
    _normalised("fused_recurrent_kda", values, inplace_final_state=True)
    return torch.empty_like(values[2], memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.inputs = [None if isinstance(x, Tensor) else (x,) for x in inputs]


def _backward(op: Op, ctx: Any, grad_o: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
    saved, twice = iter(ctx.saved_tensors), torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, so that a tensor given for two arguments gets the gradient of each.
        values = [
            kept[0] if kept is not None else x.view_as(x) if (x := next(saved)).requires_grad else x
            for kept in ctx.inputs
        ]
        call, _ = _normalised(op, tuple(values))
        o, state = getattr(backends.load("torch"), op)(call)
    pairs = [(o, grad_o.view(o.shape)), (state, grad_state)]
    recorded = [(x, grad) for x, grad in pairs if x is not None and x.requires_grad]  # not o, of a call without tokens
    outputs, grads = [x for x, _ in recorded], [grad for _, grad in recorded]
    wanted = [x for x, needed in zip(values, ctx.needs_input_grad, strict=True) if needed]
    found = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True, create_graph=twice))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)


for _op, _operator in (("chunk_kda", chunk_kda), ("fused_recurrent_kda", fused_recurrent_kda)):
    _operator.register_fake(functools.partial(_fake, _op))
    _operator.register_autograd(functools.partial(_backward, _op), setup_context=_save)
