"""torch.compile over training steps: gradients equal eager ones over many lengths, in few graphs, packed or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import kda
from kda.golden import inputs, rel_rmse
from kda.nn import KimiDeltaAttention

LENGTHS = (7, 1, 150, 64, 65, 16, 2, 33, 128, 100)
PACKED = ([5, 0, 9], [1, 1], [64, 86], [150], [3, 2, 1, 60], [7], [40, 40, 40])
GRAPHS = 3
"""One for the first shapes, one for all others, and one for sizes of 1, for which dynamo makes graphs of their own."""

INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_compiler")


@pytest.fixture
def fresh_compiler() -> None:
    torch._dynamo.reset()


def step(operator: Callable[..., Any], call: dict[str, Any]) -> list[Tensor]:
    """o, the state and the gradients of everything."""
    leaves = {name: call[name].detach().clone().requires_grad_() for name in INPUTS}
    o, state = operator(**call | leaves)
    weight = torch.linspace(-1, 1, o.numel()).view(o.shape)
    ((o * weight).sum() + state.square().sum()).backward()
    return [o, state, *(x.grad for x in leaves.values())]


def drawn(lengths: list[int] | int) -> dict[str, Any]:
    sizes = (1, lengths, 1, 8) if isinstance(lengths, int) else (1, sum(lengths) + 2, 1, 8)
    options = {} if isinstance(lengths, int) else {"lengths": lengths}
    return inputs.raw(*sizes, 8, 2, dtype=torch.float32, initial_state=True, **options)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda"])
def test_a_training_step_over_many_lengths(name: str, packed: bool, backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    operator = getattr(kda, name)

    def layer(q: Tensor, **rest: Any) -> Any:
        o, state = operator(2.0 * q, **rest)
        return o + 1.0, state

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for lengths in PACKED if packed else LENGTHS:
        call = drawn(lengths)
        for actual, expected in zip(step(compiled, call), step(layer, call), strict=True):
            assert rel_rmse(actual, expected) <= 1e-6, lengths
    assert counter.frame_count <= GRAPHS


def test_the_layer_trains_in_few_graphs() -> None:
    torch.manual_seed(0)
    layer = KimiDeltaAttention(16, 2, 8)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for length in LENGTHS:
        x = torch.randn(2, length, 16)
        grads = []
        for run in (layer, compiled):
            layer.zero_grad()
            run(x)[0].square().sum().backward()
            grads.append([p.grad.clone() for p in layer.parameters()])
        for expected, actual in zip(*grads, strict=True):
            assert rel_rmse(actual, expected) <= 1e-5
    assert counter.frame_count <= GRAPHS


@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_the_transforms_of_torch_func(operator: Callable[..., Any]) -> None:
    call = inputs.stable(1, 6, 1, 3, dtype=torch.float64)
    q = call.pop("q")

    def loss(x: Tensor) -> Tensor:
        return operator(x, **call)[0].square().sum()

    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    assert torch.equal(torch.func.grad(loss)(q), expected)
    _, vjp = torch.func.vjp(loss, q)
    assert torch.equal(vjp(torch.ones((), dtype=torch.float64))[0], expected)
    torch.testing.assert_close(torch.func.jacrev(loss)(q), expected)
    hessian = torch.autograd.functional.hessian(loss, q)
    torch.testing.assert_close(torch.func.hessian(loss)(q), hessian)
    with pytest.warns(UserWarning, match="batching rule"):  # torch's own, and no fault
        assert torch.equal(torch.func.vmap(loss)(q[None].repeat(2, *[1] * q.dim()))[1], loss(q))


def test_a_kernel_backend_refuses_them_by_name(register: Callable[..., Any]) -> None:
    class Kernel:
        about, differentiable, takes = "", False, kda.backends.load("torch").takes

        def unusable(self) -> list[str]:
            return []

        def refuses(self, call: Any) -> list[str]:
            return []

    register("kernel", Kernel())
    call = inputs.stable(1, 3, 1, 4, dtype=torch.float32)
    q = call.pop("q")
    with pytest.raises(NotImplementedError, match=r"'kernel' cannot take this chunk_kda call: the transforms of torch"):
        torch.func.grad(lambda x: kda.chunk_kda(x, **call, backend="kernel")[0].sum())(q)


@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_meta_tensors_run_through_the_fakes(operator: Callable[..., Any]) -> None:
    call = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in drawn([3, 0, 4]).items()}
    call["q"].requires_grad_()
    o, state = operator(**call)
    assert o.is_meta and o.shape == call["v"].shape and state.is_meta and state.shape == call["initial_state"].shape
    o.sum().backward()
    assert call["q"].grad.is_meta and call["q"].grad.shape == call["q"].shape
    with pytest.raises(ValueError, match="beta: expected shape"):
        operator(**call | {"beta": call["beta"][:, 1:]})
