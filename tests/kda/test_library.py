"""The calls as torch operators: traced by torch.compile as one node each, fake tensors, and what opcheck asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_backends import WithoutBackward
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

import kda
from kda.backends.call import ARGUMENTS, DIFFERENTIABLE, OPS, WRITTEN, Op
from kda.golden import inputs

WRITING = {f"{op}_": [*(a.name for a in ARGUMENTS[op]), "backend"] for op in OPS}
PER_SIGNATURE = WRITING | {
    op: [name for name in WRITING[f"{op}_"] if name not in ("inplace_final_state", *WRITTEN[op])] for op in OPS
}
"""The arguments of the torch operator of that name, in its order."""


def leaves(call: dict[str, Any]) -> dict[str, Any]:
    return {n: x.clone().requires_grad_() if n in DIFFERENTIABLE else x for n, x in call.items()}


def by_position(name: str, call: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments of torch.ops.kda's operator `name`; defaults where the call leaves one out."""
    op: Op = "chunk_kda" if name.startswith("chunk") else "fused_recurrent_kda"
    defaults = {a.name: a.default for a in ARGUMENTS[op] if a.optional} | {"backend": "torch"}
    return tuple((defaults | call)[argument] for argument in PER_SIGNATURE[name])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_place_is_refused_where_autograd_records_while_compiling(backend):
    call = inputs.stable(1, 2, 1, 4, dtype=torch.float32, initial_state=True)
    call["q"].requires_grad_()
    step = torch.compile(lambda **c: kda.fused_recurrent_kda(**c, inplace_final_state=True), backend=backend)
    with pytest.raises(Exception, match=r"inplace_final_state: expected torch.no_grad\(\) around it, got q"):
        step(**call)


def test_value_checks_do_not_stop_the_compiler(monkeypatch):
    monkeypatch.setenv("KDA_CHECK", "1")
    call = inputs.stable(1, 5, 1, 4, dtype=torch.float32)
    o, _ = torch.compile(lambda **c: kda.chunk_kda(**c), fullgraph=True, backend="aot_eager")(**call)
    assert torch.equal(o, kda.chunk_kda(**call)[0])


def test_fake_tensors_get_a_fake_result():
    with FakeTensorMode() as mode:
        call = {n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in inputs.stable(1, 5, 1, 64).items()}
        o, state = kda.fused_recurrent_kda(**call, backend="tilelang")
        assert o.shape == (1, 5, 1, 64) and state.shape == (1, 1, 64, 64)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("operator", ["chunk_kda", "fused_recurrent_kda"])
def test_compiles_as_one_graph(packed, operator):
    call = inputs.raw(1, 40, 1, 16, dtype=torch.float32, lengths=[15, 25] if packed else None)
    if packed:  # rank 3 in, rank 3 out
        call |= {name: call[name][0] for name in ("q", "k", "v", "g", "beta")}
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def layer(q: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
        o, state = getattr(kda, operator)(2 * q, **rest, backend="torch")
        return o + 1, state

    call_without_q = {name: x for name, x in call.items() if name != "q"}
    o, state = torch.compile(layer, fullgraph=True, backend=count)(call["q"], **call_without_q)
    expected_o, expected_state = layer(call["q"], **call_without_q)
    assert len(graphs) == 1
    assert any(f"kda.{operator}" in str(node.target) for node in graphs[0].graph.nodes)
    torch.testing.assert_close(o, expected_o, rtol=0, atol=0)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)


def check_operator(operator: Any, arguments: tuple[Any, ...], *more: str) -> None:
    """The schema, the fake implementation and the gradient agree with what the operator does."""
    tests = ("test_schema", "test_faketensor", "test_autograd_registration", *more)
    torch.library.opcheck(operator, arguments, test_utils=tests)


@pytest.mark.parametrize("output_final_state", [True, False])
@pytest.mark.parametrize("state_v_first", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op, output_final_state, state_v_first):
    sizes = {"dtype": torch.float32, "initial_state": True, "state_v_first": state_v_first}
    call = leaves(inputs.stable(1, 20, 1, 16, 8, 2, **sizes)) | {"output_final_state": output_final_state}
    check_operator(getattr(torch.ops.kda, op).default, by_position(op, call), "test_aot_dispatch_static")


@pytest.mark.parametrize("indices", [[3, 1], [[3, 2], [1, 4]]])
def test_opcheck_of_pools(indices):
    call = inputs.stable(2, 2, 1, 16, 8, 2, dtype=torch.float32) | {"ssm_state_indices": torch.tensor(indices)}
    call["initial_state"] = torch.randn(5, 2, 8, 16)
    check_operator(torch.ops.kda.fused_recurrent_kda.default, by_position("fused_recurrent_kda", call))
    for written in ({"inplace_final_state": True}, {"out": torch.empty(2, 2, 2, 8)}):
        arguments = by_position("fused_recurrent_kda_", call | written | {"output_final_state": True})
        check_operator(torch.ops.kda.fused_recurrent_kda_.default, arguments)


def test_opcheck_of_pools_in_chunk_kda():
    call = inputs.stable(2, 20, 1, 16, 8, 2, dtype=torch.float32) | {
        "initial_state": torch.randn(5, 2, 8, 16).bfloat16()
    }
    call |= {"ssm_state_indices": torch.tensor([3, 1]), "has_initial_state": torch.tensor([True, False])}
    check_operator(torch.ops.kda.chunk_kda.default, by_position("chunk_kda", call | {"output_final_state": True}))
    arguments = by_position("chunk_kda_", call | {"inplace_final_state": True, "out": torch.empty(2, 20, 2, 8)})
    check_operator(torch.ops.kda.chunk_kda_.default, arguments)


@pytest.mark.parametrize("op", OPS)
def test_opcheck_of_the_gradient(op):
    arguments = by_position(op, inputs.raw(1, 20, 1, 16, 8, 2, dtype=torch.float32, initial_state=True))
    o, states = getattr(torch.ops.kda, op)(*arguments)
    wanted = [name in ("q", "g", "A_log") for name in PER_SIGNATURE[op]]
    backward = getattr(torch.ops.kda, f"{op}_backward")
    check_operator(backward.default, (wanted, torch.ones_like(o), torch.ones_like(states), *arguments))
    found = backward(wanted, torch.ones_like(o), torch.ones_like(states), *arguments)
    assert [x.shape for x in found] == [arguments[i].shape for i, needed in enumerate(wanted) if needed]
    assert all(x.any() for x in found)


@pytest.mark.parametrize("backend", ["torch", "kernels"])
@pytest.mark.parametrize("op", OPS)
def test_compiled_the_gradient_is_one_node_too(op, backend, register):
    register("kernels", WithoutBackward())
    call = inputs.raw(1, 20, 2, 16, 8, 4, dtype=torch.float32, lengths=[5, 0, 15], initial_state=True)
    nodes: list[str] = []

    def note(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes if str(node.target).startswith("kda."))
        return make_boxed_func(graph.forward)

    def loss(call: dict[str, Any]) -> Tensor:
        o, states = getattr(kda, op)(**call, backend=backend)
        return (o * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum() + states.square().sum()

    found = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend=aot_autograd(fw_compiler=note, bw_compiler=note))):
        x = leaves(call)
        run(x).backward()
        found.append({name: x[name].grad for name in DIFFERENTIABLE})
    assert nodes == [f"kda.{op}.default", f"kda.{op}_backward.default"]
    for name, gradient in found[0].items():
        assert gradient.any(), name
        torch.testing.assert_close(found[1][name], gradient)


def test_a_pool_is_written_in_place_when_compiled():
    call = inputs.stable(2, 1, 1, 16, dtype=torch.float32)
    pool = torch.randn(4, 1, 16, 16)
    keywords = {"ssm_state_indices": torch.tensor([3, 1]), "inplace_final_state": True, "backend": "torch"}
    plain, compiled = pool.clone(), pool.clone()
    o, _ = kda.fused_recurrent_kda(**call | {"initial_state": plain}, **keywords)
    step = torch.compile(lambda **c: kda.fused_recurrent_kda(**c, **keywords), fullgraph=True, backend="aot_eager")
    compiled_o, returned = step(**call | {"initial_state": compiled})
    assert torch.equal(compiled_o, o) and torch.equal(compiled, plain) and not torch.equal(plain, pool)
    assert torch.equal(returned, plain)


def test_bad_arguments_are_named_while_compiling():
    call = inputs.stable(1, 20, 1, 16, dtype=torch.float32)
    call["beta"] = call["beta"][:, 1:]
    with pytest.raises(Exception, match=r"beta: expected shape"):
        torch.compile(lambda **c: kda.chunk_kda(**c, backend="torch"), fullgraph=True, backend="eager")(**call)
