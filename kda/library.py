"""The calls as torch operators, which torch.compile takes for one node each; and their gradients.

`kda::chunk_kda` and `kda::fused_recurrent_kda` are the two operators; `kda::chunk_kda_` and `kda::fused_recurrent_kda_`
are the same for calls that write to tensors of their caller's; and `kda::chunk_kda_backward`,
`kda::fused_recurrent_kda_backward` are their gradients. Their schemas are made from the table of arguments.
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
from kda.backends.call import ARGUMENTS, DIFFERENTIABLE, OPS, WRITTEN, KdaCall, Op
from kda.checks import checked
from kda.state_checks import refuse_recording

_INPLACE = "inplace_final_state"
_WRITING = {op: {a.name: a.kind for a in ARGUMENTS[op]} | {"backend": "str?"} for op in OPS}
_KINDS = {op: {n: kind for n, kind in _WRITING[op].items() if n not in (_INPLACE, *WRITTEN[op])} for op in OPS}


def traced(op: Op, values: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """A call of a compiler's or on fake tensors, by its torch operator; `values` has every argument, `backend` too."""
    asked_by = [name for name in (_INPLACE, *WRITTEN[op]) if values[name] is not None and values[name] is not False]
    if not asked_by:
        o, states = getattr(torch.ops.kda, op)(**{name: values[name] for name in _KINDS[op]})
    else:
        refuse_recording(asked_by[0], values)
        o, states = getattr(torch.ops.kda, f"{op}_")(**values)
        o = o if values["out"] is None else values["out"]
        states = values["initial_state"] if values[_INPLACE] else states
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
    if keeping is not None and call.B * call.T and call.dense_states:
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

    A backend without a backward pass of its own gets torch's, which computes the call anew; so does every backend where
    states are in slots or in half precision, and with `twice`, that is where autograd has to differentiate the result
    once more.
    """
    backward = getattr(backends.load(backend), f"{call.op}_backward", None)
    if backward is not None and not twice and call.B * call.T and call.dense_states:
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


def _checked(op: Op, kinds: Mapping[str, str], values: Sequence[Any]) -> tuple[KdaCall, str | None]:
    """The call that an operator's arguments make, and the backend that they name."""
    named = dict(zip(kinds, values, strict=True))
    backend = named.pop("backend")
    return checked(op, **named), backend


def _forward(op: Op, *values: Any) -> tuple[Tensor, Tensor]:
    """o, and the states; where they aren't asked for, an empty tensor stands for them."""
    call, backend = _checked(op, _KINDS[op], values)
    o, states = _own(*backends.run(backends.select(call, backend), call))
    return o.view(values[2].shape), call.q.new_empty(0) if states is None else states


def _fake_forward(op: Op, *values: Any) -> tuple[Tensor, Tensor]:
    call, _ = _checked(op, _KINDS[op], values)
    return torch.empty_like(values[2], memory_format=torch.contiguous_format), _fake_states(call)


def _fake_states(call: KdaCall) -> Tensor:
    if not call.output_final_state or call.inplace_final_state:
        return call.q.new_empty(0)
    states = call.B * call.T if call.state_per_token else call.N
    return call.q.new_empty(states, *call.state_shape, dtype=call.final_dtype)


def _writing(op: Op, *values: Any) -> tuple[Tensor, Tensor]:
    """As `_forward`; an empty tensor stands for o too where it is in `out`, and for states in `initial_state`."""
    call, backend = _checked(op, _WRITING[op], values)
    o, states = backends.run(backends.select(call, backend), call)
    o = call.q.new_empty(0) if call.out is not None else _own(o, None)[0].view(values[2].shape)
    return o, call.q.new_empty(0) if states is None or call.inplace_final_state else states


def _fake_writing(op: Op, *values: Any) -> tuple[Tensor, Tensor]:
    call, _ = _checked(op, _WRITING[op], values)
    o = torch.empty_like(values[2], memory_format=torch.contiguous_format)
    return o if call.out is None else call.q.new_empty(0), _fake_states(call)


def _backward(op: Op, wanted: Sequence[bool], grad_o: Tensor, grad_states: Tensor, *values: Any) -> list[Tensor]:
    """The gradients of the arguments that are wanted, in their order."""
    names = [name for name, needed in zip(_KINDS[op], wanted, strict=True) if needed]
    call, backend = _checked(op, _KINDS[op], values)
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


def _schema(kinds: Mapping[str, str], returns: str, before: str = "") -> str:
    return f"({before}{', '.join(f'{kind} {name}' for name, kind in kinds.items())}) -> {returns}"


def _define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], *mutated: str) -> Any:
    operator = torch.library.custom_op(f"kda::{name}", run, mutates_args=mutated, schema=schema)
    operator.register_fake(fake)
    return operator


for _op in OPS:
    _gradient = _schema(_KINDS[_op], "Tensor[]", before="bool[] wanted, Tensor grad_o, Tensor grad_states, ")
    _define(f"{_op}_backward", _gradient, partial(_backward, _op), partial(_fake_backward, _op))
    _operator = _define(
        _op, _schema(_KINDS[_op], "(Tensor, Tensor)"), partial(_forward, _op), partial(_fake_forward, _op)
    )
    _operator.register_autograd(partial(_differentiate, _op), setup_context=_save)
    _mutated = {
        name: f"Tensor({letter}!)?" for letter, name in zip("abcdef", ("initial_state", *WRITTEN[_op]), strict=False)
    }
    _schema_ = _schema(_WRITING[_op] | _mutated, "(Tensor, Tensor)")
    _define(f"{_op}_", _schema_, partial(_writing, _op), partial(_fake_writing, _op), *_mutated)
