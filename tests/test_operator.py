"""`kda::chunk_kda` as a torch operator: traced by torch.compile, and the gradient of backends that have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import kda
from kda import backends
from kda.golden import inputs
from kda.operator import CHUNK_ARGUMENTS, INPLACE_ARGUMENTS, RECURRENT_ARGUMENTS

GRADIENTS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")


class WithoutBackward:
    """The torch backend, but cut off from autograd, as a kernel is."""

    differentiable = False

    def unusable(self) -> list[str]:
        return []

    def refuses(self, call: Any) -> list[str]:
        return []

    def chunk_kda(self, call: Any) -> tuple[Tensor, Tensor | None]:
        assert not torch.is_grad_enabled() or not call.q.requires_grad
        with torch.no_grad():
            return _torch.chunk_kda(call)

    def fused_recurrent_kda(self, call: Any) -> tuple[Tensor, Tensor | None]:
        assert not torch.is_grad_enabled() or not call.q.requires_grad
        with torch.no_grad():
            return _torch.fused_recurrent_kda(call)


def _cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """tilelang becomes a backend without a backward pass that runs here."""
    load = backends.load
    monkeypatch.setattr(backends, "load", lambda name: WithoutBackward() if name == "tilelang" else load(name))
    monkeypatch.setattr(backends, "unusable", lambda name: [])


_torch = backends.load("torch")


def _leaves(call: dict[str, Any]) -> dict[str, Any]:
    return {n: x.clone().requires_grad_() if n in GRADIENTS and x is not None else x for n, x in call.items()}


def _gradients(operator: Callable[..., Any], call: dict[str, Any], backend: str) -> dict[str, Tensor]:
    call = _leaves(call)
    o, state = operator(**call, backend=backend)
    loss = (o * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum()
    (loss if state is None else loss + state.square().sum()).backward()
    return {name: call[name].grad for name in GRADIENTS if isinstance(call.get(name), Tensor)}


@pytest.mark.parametrize("options", [{"lengths": [3, 0, 67]}, {"lower_bound": -5.0}])
@pytest.mark.parametrize("output_final_state", [True, False])
@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_a_backend_without_backward_gets_torchs_gradient(monkeypatch, options, output_final_state, operator):
    _cut_off(monkeypatch)
    call = inputs.raw(1, 70, 2, 16, 8, 4, dtype=torch.float32, initial_state=True, **options)
    call["output_final_state"] = output_final_state
    expected, actual = (_gradients(operator, call, backend) for backend in ("torch", "tilelang"))
    assert set(actual) == set(GRADIENTS)
    for name, gradient in expected.items():
        assert gradient.any(), name
        torch.testing.assert_close(actual[name], gradient)


@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_second_derivatives(monkeypatch, operator):
    _cut_off(monkeypatch)
    call = inputs.stable(1, 3, 1, 2, 1, dtype=torch.float64, initial_state=True)
    x = {name: call[name].double().requires_grad_() for name in ("q", "k", "v", "g", "beta", "initial_state")}
    run = lambda *values: operator(**call | dict(zip(x, values, strict=True)), backend="tilelang")  # noqa: E731
    assert torch.autograd.gradgradcheck(run, tuple(x.values()))


@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_a_call_without_tokens_passes_its_states_gradient_on(monkeypatch, operator):
    _cut_off(monkeypatch)
    call = inputs.stable(1, 0, 1, 4, dtype=torch.float32, initial_state=True)
    call["initial_state"].requires_grad_()
    operator(**call, backend="tilelang")[1].sum().backward()
    assert (call["initial_state"].grad == 1).all()


def test_one_tensor_in_two_places_gets_both_gradients(monkeypatch):
    _cut_off(monkeypatch)
    found = []
    for backend in ("torch", "tilelang"):
        call = inputs.stable(1, 5, 1, 4, dtype=torch.float32)
        call["q"] = call["k"] = call["k"].requires_grad_()
        kda.chunk_kda(**call, backend=backend)[0].sum().backward()
        found.append(call["k"].grad)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("packed", [False, True])
def test_the_output_can_be_modified_in_place(monkeypatch, packed):
    _cut_off(monkeypatch)
    call = inputs.stable(1, 5, 1, 4, dtype=torch.float32, lengths=[5] if packed else None)
    if packed:
        call |= {name: call[name][0] for name in ("q", "k", "v", "g", "beta")}
    call["v"] = call["v"].requires_grad_()
    o, _ = kda.chunk_kda(**call, backend="tilelang")
    o += 1
    o.sum().backward()
    assert call["v"].grad.any()


def test_autograd_sees_that_a_kernel_has_written_a_state(monkeypatch):
    _cut_off(monkeypatch)
    call = inputs.stable(1, 2, 1, 4, dtype=torch.float32, initial_state=True)
    factor = torch.ones_like(call["initial_state"]).requires_grad_()
    y = (call["initial_state"] * factor).sum()
    kda.fused_recurrent_kda(**call, inplace_final_state=True, backend="tilelang")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


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


def test_only_the_gradients_asked_for_are_computed(monkeypatch):
    _cut_off(monkeypatch)
    call = inputs.stable(1, 20, 1, 16, dtype=torch.float32)
    call["v"].requires_grad_()
    kda.chunk_kda(**call, backend="tilelang")[0].sum().backward()
    assert call["v"].grad.any() and call["q"].grad is None


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


FLAGS = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")


def _opcheck(operator: Any, arguments: dict[str, str], call: dict[str, Any]) -> None:
    """The schema, the fake implementation and the gradient agree with what the operator does."""
    defaults = dict.fromkeys(FLAGS, False) | {"backend": "torch"}
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(operator, tuple(call.get(n, defaults.get(n)) for n in arguments), test_utils=tests)


@pytest.mark.parametrize("output_final_state", [True, False])
@pytest.mark.parametrize("state_v_first", [True, False])
def test_opcheck(output_final_state, state_v_first):
    sizes = {"dtype": torch.float32, "initial_state": True, "state_v_first": state_v_first}
    call = _leaves(inputs.stable(1, 20, 1, 16, 8, 2, **sizes)) | {"output_final_state": output_final_state}
    _opcheck(torch.ops.kda.chunk_kda.default, CHUNK_ARGUMENTS, call)
    _opcheck(torch.ops.kda.fused_recurrent_kda.default, RECURRENT_ARGUMENTS, call)


@pytest.mark.parametrize("indices", [[3, 1], [[3, 2], [1, 4]]])
def test_opcheck_of_pools(indices):
    call = inputs.stable(2, 2, 1, 16, 8, 2, dtype=torch.float32) | {"ssm_state_indices": torch.tensor(indices)}
    call["initial_state"] = torch.randn(5, 2, 8, 16)
    _opcheck(torch.ops.kda.fused_recurrent_kda.default, RECURRENT_ARGUMENTS, call)
    _opcheck(torch.ops.kda.fused_recurrent_kda_.default, INPLACE_ARGUMENTS, call)


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
