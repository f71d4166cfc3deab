"""One table of arguments: signatures, torch operators and checks follow it; and an eager call is looked at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_backends import FakeBackend, WithoutBackward

import kda
from kda import backends, library, ops
from kda.backends.call import ARGUMENTS, DIFFERENTIABLE, OPS, PER_TOKEN, WRITTEN, Op
from kda.golden import inputs

each_op = pytest.mark.parametrize("op", OPS)


@each_op
def test_the_signature_is_the_table(op: Op) -> None:
    *parameters, backend = inspect.signature(getattr(kda, op)).parameters.values()
    required = inspect.Parameter.empty
    table = [(a.name, a.default if a.optional else required) for a in ARGUMENTS[op]]
    assert [(p.name, p.default) for p in parameters] == table
    kinds = {False: inspect.Parameter.POSITIONAL_OR_KEYWORD, True: inspect.Parameter.KEYWORD_ONLY}
    assert [p.kind for p in parameters] == [kinds[a.keyword] for a in ARGUMENTS[op]]
    assert (backend.name, backend.default, backend.kind) == ("backend", None, inspect.Parameter.KEYWORD_ONLY)


def schema(name: str) -> list[tuple[str, str]]:
    """(name, kind) of every argument of a torch operator."""
    return [(a.name, str(a.type)) for a in getattr(torch.ops.kda, name).default._schema.arguments]


def in_the_table(op: Op, *, writing: bool = False) -> list[tuple[str, str]]:
    """What a call has that writes to tensors of its caller's, or of any other one."""
    spelled = {"Tensor": "Tensor", "Tensor?": "Optional[Tensor]", "bool": "bool", "float?": "Optional[float]",
               "int?": "Optional[int]"}  # fmt: skip
    left_out = () if writing else ("inplace_final_state", *WRITTEN[op])
    table = [(a.name, spelled[a.kind]) for a in ARGUMENTS[op] if a.name not in left_out]
    return [*table, ("backend", "Optional[str]")]


@each_op
def test_the_torch_operators_have_the_same_arguments(op: Op) -> None:
    assert schema(op) == in_the_table(op)
    assert schema(f"{op}_backward") == [
        ("wanted", "List[bool]"), ("grad_o", "Tensor"), ("grad_states", "Tensor"), *in_the_table(op)
    ]  # fmt: skip


@each_op
def test_the_operator_that_writes_differs_by_what_it_writes_to(op: Op) -> None:
    given = getattr(torch.ops.kda, f"{op}_").default._schema.arguments
    assert schema(f"{op}_") == in_the_table(op, writing=True)
    writes = [a.name for a in given if a.alias_info and a.alias_info.is_write]
    assert writes == ["initial_state", *WRITTEN[op]] and "out" in writes


def test_what_the_table_says_of_tensors() -> None:
    assert PER_TOKEN == ("q", "k", "v", "g", "beta")
    assert set(DIFFERENTIABLE) == {*PER_TOKEN, "initial_state", "A_log", "dt_bias"}
    recurrent, chunk = ({a.name for a in ARGUMENTS[op]} for op in ("fused_recurrent_kda", "chunk_kda"))
    drafts = {"intermediate_states_buffer", "intermediate_state_indices"}
    assert recurrent - chunk == {"num_accepted_tokens", *drafts}
    assert chunk - recurrent == {"has_initial_state", "checkpoint_offsets", "checkpoint_states", "chunk_states"}


def test_arguments_may_be_given_by_position() -> None:
    call = inputs.raw(1, 9, 2, 8, lengths=[4, 5], dtype=torch.float32, initial_state=True)
    for op in OPS:
        operator = getattr(kda, op)
        values = [call.get(a.name, a.default) for a in ARGUMENTS[op] if not a.keyword]
        for by_position, by_name in zip(operator(*values), operator(**call), strict=True):
            assert torch.equal(by_position, by_name)


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[str]:
    """`module.name` notes that it was called, from now on."""
    called: list[str] = []
    original: Callable[..., Any] = getattr(module, name)

    def noting(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, noting)
    return called


@each_op
@pytest.mark.parametrize("backend", [WithoutBackward(), FakeBackend()], ids=["without backward", "differentiable"])
def test_a_call_is_checked_once_and_given_a_backend_once(op: Op, backend: FakeBackend, register, monkeypatch) -> None:
    """Forth and back: the gradient is computed of the very call that was checked."""
    register("noting", backend)
    checks, choices = counted(monkeypatch, ops, "checked"), counted(monkeypatch, backends, "select")
    by_operator = counted(monkeypatch, library, "checked")
    backend.calls.clear()
    call = inputs.raw(1, 9, 2, 8, dtype=torch.float32)
    call["v"].requires_grad_()
    o, _ = getattr(kda, op)(**call, backend="noting")
    o.sum().backward()
    assert call["v"].grad.any() and len(backend.calls) == 1
    assert (checks, choices, by_operator) == (["checked"], ["select"], [])
