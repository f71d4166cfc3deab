"""The calls as torch operators, which torch.compile takes for one node each; and their gradients.

`kda::chunk_kda` and `kda::fused_recurrent_kda` are the two operators, `kda::fused_recurrent_kda_` is the latter in
place, and `kda::chunk_kda_backward`, `kda::fused_recurrent_kda_backward` are their gradients. Their schemas are made
from the table of arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kda import backends
from kda.backends import environment
from kda.backends.call import ARGUMENTS, DIFFERENTIABLE, OPS, KdaCall, Op, state_dtype
from kda.checks import checked, refuse_recording

_INPLACE = "inplace_final_state"  # each answer to it is an operator of its own
_KINDS = {op: {a.name: a.kind for a in ARGUMENTS[op] if a.name != _INPLACE} | {"backend": "str?"} for op in OPS}


def traced(op: Op, values: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """A call of a compiler's or on fake tensors, by its torch operator; `values` has every argument, `backend` too."""
    if values.pop(_INPLACE, False):
        refuse_recording(values)
        o, states = torch.ops.kda.fused_recurrent_kda_(**values), values["initial_state"]
    else:
        o, states = getattr(torch.ops.kda, op)(**values)
    return o, states if values["output_final_state"] else None


class Recorded(torch.autograd.Function):
    """A checked call of a backend that autograd cannot see through, in its graph.

    The inputs are saved, and with KDA_KEEP_TABLE what the backend hands out for its backward pass too.
    """

    @staticmethod
    def forward(ctx: Any, call: KdaCall, backend: str, *_: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Behind the backend come the call's own tensors named DIFFERENTIABLE, since autograd has to see them."""
        values = {argument.name: getattr(call, argument.name) for argument in ARGUMENTS[call.op]}
        ctx.tensors = [name for name, x in values.items() if isinstance(x, Tensor)]
        ctx.backend = backend
        ctx.rest = {"op": call.op, "memo": call.memo} | {
            name: x for name, x in values.items() if name not in ctx.tensors
        }
        o, states, kept = _keeping(backend, call)
        ctx.save_for_backward(*(values[name] for name in ctx.tensors), *kept)
        return _own(o, states)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: hooks may have to fetch them
        inputs, kept = saved[: len(ctx.tensors)], saved[len(ctx.tensors) :]
        call = KdaCall(**ctx.rest, **dict(zip(ctx.tensors, inputs, strict=True)))
        wanted = [name for name, needed in zip(DIFFERENTIABLE, ctx.needs_input_grad[2:], strict=True) if needed]
        found = gradients(call, ctx.backend, wanted, grads, kept, twice=torch.is_grad_enabled())
        return (None, None, *(found.get(name) for name in DIFFERENTIABLE))


def _keeping(backend: str, call: KdaCall) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """o, the states, and what the backend would have to compute again in its backward pass, if it is to be kept."""
    keeping = getattr(backends.load(backend), f"{call.op}_keeping", None) if environment.keeping_table() else None
    if keeping is not None and call.B * call.T:
        return keeping(call)
    return *backends.run(backend, call), ()


def gradients(
    call: KdaCall,
    backend: str,
    wanted: Sequence[str],
    grads: Sequence[Tensor | None],
    kept: Sequence[Tensor] = (),
    *,
    twice: bool = False,
) -> Mapping[str, Tensor | None]:
    """Of the call's tensors that are named, from those of o and of the states.

    A backend without a backward pass of its own gets torch's, which computes the call anew; so does every backend with
    `twice`, that is where autograd has to differentiate the result once more.
    """
    backward = getattr(backends.load(backend), f"{call.op}_backward", None)
    if backward is not None and not twice and call.B * call.T:
        return backward(call, wanted, *grads, *kept)
    with torch.enable_grad():
        # Tensors of their own, so that one given for two arguments gets the gradient of each.
        own = Tensor.view_as if twice else lambda x, _: x.detach().requires_grad_()
        leaves: dict[str, Any] = {name: own(getattr(call, name), getattr(call, name)) for name in wanted}
        outputs = backends.run("torch", replace(call, **leaves, memo={}))
    recorded = [(y, grad.view(y.shape)) for y, grad in zip(outputs, grads, strict=True)
                if y is not None and grad is not None and y.requires_grad]  # fmt: skip
    if not recorded:  # a call without tokens whose states nobody wants
        return dict.fromkeys(wanted)
    ys, y_grads = zip(*recorded, strict=True)
    found = torch.autograd.grad(ys, tuple(leaves.values()), y_grads, allow_unused=True, create_graph=twice)
    return dict(zip(wanted, found, strict=True))


def _own(o: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """o in memory of its own: a view could not be modified in place by a caller for whom autograd records."""
    return o.clone() if o._is_view() else o, states


def _checked(op: Op, values: Sequence[Any], **inplace: bool) -> tuple[KdaCall, str | None]:
    """The call that an operator's arguments make, and the backend that they name."""
    named = dict(zip(_KINDS[op], values, strict=True))
    backend = named.pop("backend")
    return checked(op, **named, **inplace), backend


def _forward(op: Op, *values: Any) -> tuple[Tensor, Tensor]:
    """o, and the states; where they aren't asked for, an empty tensor stands for them."""
    call, backend = _checked(op, values)
    o, states = _own(*backends.run(backends.select(call, backend), call))
    return o.view(values[2].shape), call.q.new_empty(0) if states is None else states


def _fake_forward(op: Op, *values: Any) -> tuple[Tensor, Tensor]:
    call, _ = _checked(op, values)
    o = torch.empty_like(values[2], memory_format=torch.contiguous_format)
    if not call.output_final_state:
        return o, call.q.new_empty(0)
    states = call.B * call.T if call.state_per_token else call.N
    return o, call.q.new_empty(states, *call.state_shape, dtype=state_dtype(call.q.dtype))


def _inplace(*values: Any) -> Tensor:
    """o; the states are in `initial_state`."""
    call, backend = _checked("fused_recurrent_kda", values, inplace_final_state=True)
    o, _ = _own(*backends.run(backends.select(call, backend), call))
    return o.view(values[2].shape)


def _fake_inplace(*values: Any) -> Tensor:
    _checked("fused_recurrent_kda", values, inplace_final_state=True)
    return torch.empty_like(values[2], memory_format=torch.contiguous_format)


def _backward(op: Op, wanted: Sequence[bool], grad_o: Tensor, grad_states: Tensor, *values: Any) -> list[Tensor]:
    """The gradients of the arguments that are wanted, in their order."""
    names = [name for name, needed in zip(_KINDS[op], wanted, strict=True) if needed]
    call, backend = _checked(op, values)
    grads = (grad_o, grad_states if call.output_final_state else None)
    with _autograd_inside():
        found = gradients(call, backends.select(call, backend), names, grads)
    like = dict(zip(_KINDS[op], values, strict=True))
    result = [torch.empty_like(like[name], memory_format=torch.contiguous_format) for name in names]
    for name, x in zip(names, result, strict=True):
        _ = x.zero_() if (gradient := found[name]) is None else x.copy_(gradient.view(x.shape))
    return result


def _fake_backward(op: Op, wanted: Sequence[bool], grad_o: Tensor, grad_states: Tensor, *values: Any) -> list[Tensor]:
    like = (x for x, needed in zip(values, wanted, strict=True) if needed)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like]


@contextmanager
def _autograd_inside() -> Iterator[None]:
    """torch runs an operator with autograd cut off; inside here it records again."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor, keys.ADInplaceOrView):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.inputs = [None if isinstance(x, Tensor) else (x,) for x in inputs]


def _differentiate(op: Op, ctx: Any, grad_o: Tensor, grad_states: Tensor) -> tuple[Tensor | None, ...]:
    saved = iter(ctx.saved_tensors)
    values = [next(saved) if kept is None else kept[0] for kept in ctx.inputs]
    backward = getattr(torch.ops.kda, f"{op}_backward")
    found = iter(backward(list(ctx.needs_input_grad), grad_o, grad_states, *values))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)


def _schema(op: Op, returns: str, before: str = "", **changed: str) -> str:
    arguments = ", ".join(f"{kind} {name}" for name, kind in (_KINDS[op] | changed).items())
    return f"({before}{arguments}) -> {returns}"


def _define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], *mutated: str) -> Any:
    operator = torch.library.custom_op(f"kda::{name}", run, mutates_args=mutated, schema=schema)
    operator.register_fake(fake)
    return operator


for _op in OPS:
    _gradient = _schema(_op, "Tensor[]", before="bool[] wanted, Tensor grad_o, Tensor grad_states, ")
    _define(f"{_op}_backward", _gradient, partial(_backward, _op), partial(_fake_backward, _op))
    _operator = _define(_op, _schema(_op, "(Tensor, Tensor)"), partial(_forward, _op), partial(_fake_forward, _op))
    _operator.register_autograd(partial(_differentiate, _op), setup_context=_save)
_states = {"initial_state": "Tensor(a!)"}
_define("fused_recurrent_kda_", _schema("fused_recurrent_kda", "Tensor", **_states), _inplace, _fake_inplace, *_states)
