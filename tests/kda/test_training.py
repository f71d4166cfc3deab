"""Training with the layer: what is kept for the backward pass, checkpointing, DDP and FSDP2."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import train_in_parallel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kda
from kda.backends.call import DIFFERENTIABLE
from kda.golden import inputs
from kda.nn import KimiDeltaAttention

Gradients = dict[str, Tensor]


def assert_same(actual: Gradients, expected: Gradients) -> None:
    assert set(actual) == set(expected)
    for name, gradient in expected.items():
        assert gradient.any(), name
        torch.testing.assert_close(actual[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


def layers_gradients(layer: nn.Module, x: Tensor, *, recompute: bool = False, **options: Any) -> Gradients:
    """Of the parameters and of x; with `recompute`, the forward pass keeps x alone and runs once more."""
    x = x.clone().requires_grad_()
    y, _ = checkpoint(layer, x, use_reentrant=False, **options) if recompute else layer(x, **options)
    layer.zero_grad()
    y.square().mean().backward()
    return {"x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("packed", [False, True])
def test_a_checkpointed_layer_has_the_same_gradients(packed: bool) -> None:
    torch.manual_seed(0)
    layer = KimiDeltaAttention(8, 2, 4, backend="torch")
    x = torch.randn(1 if packed else 2, 70, 8)
    options = {"cu_seqlens": torch.tensor([0, 3, 67])} if packed else {}
    found = (layers_gradients(layer, x, recompute=recompute, **options) for recompute in (True, False))
    assert_same(*found)


# DDP and FSDP2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Gradients]:
    """What two processes have computed together."""
    folder = tmp_path_factory.mktemp("processes")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, train_in_parallel.__file__]
    processes = [
        subprocess.Popen([*command, rank, folder], env=environment, stderr=subprocess.PIPE, text=True) for rank in "01"
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(errors)
    return torch.load(folder / "found")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("how", ["DDP", "FSDP2"])
def test_two_processes_have_the_gradients_of_one(found: dict[str, Gradients], how: str) -> None:
    whole = train_in_parallel.gradients(train_in_parallel.model(), train_in_parallel.batch())
    assert_same(found[how], whole)


def test_a_layer_made_without_memory_gets_its_values_under_fsdp2(found: dict[str, Gradients]) -> None:
    shapes = {name: x.shape for name, x in train_in_parallel.model().named_parameters()}
    assert {name: x.shape for name, x in found["meta"].items()} == shapes
    for name, x in found["meta"].items():
        assert x.isfinite().all(), name
        if name.endswith("A_log"):
            assert ((x >= 0) & (x <= math.log(16))).all()
        if name.endswith("dt_bias"):
            step = nn.functional.softplus(x)
            assert ((step > 9e-4) & (step < 0.11)).all()


# What a forward pass of kernels keeps


@pytest.fixture(scope="module")
def runs() -> Iterator[Counter[str]]:
    """How often each kernel of tilelang has run, on the CPU, by its builder's name."""
    pytest.importorskip("tilelang")
    from kda.backends.tilelang import backward, tables

    counts: Counter[str] = Counter()

    def counted(target: str, builder: str, **parameters: Any) -> Any:
        kernel, name = build(target, builder, **parameters), builder.removeprefix(f"{tables.KERNELS}.")

        def run(*arguments: Any) -> None:
            counts[name] += 1
            kernel(*arguments)

        return run

    build = tables.build
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KDA_EMULATE", "1")
        for module in (tables, backward):
            patch.setattr(module, "build", counted)
        yield counts


def kernels_gradients(call: dict[str, Any]) -> tuple[Gradients, list[weakref.ref[Tensor]]]:
    """Of a call by tilelang; and the tensors that its forward pass saved beside the inputs."""
    leaves = {n: x.clone().requires_grad_() for n, x in call.items() if n in DIFFERENTIABLE and x is not None}
    kept = []

    def pack(x: Tensor) -> Tensor:
        if all(x.data_ptr() != leaf.data_ptr() for leaf in leaves.values()):
            kept.append(weakref.ref(x))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o, _ = kda.chunk_kda(**call | leaves, backend="tilelang")
    weights = torch.linspace(-1, 1, o.numel()).view(o.shape)
    assert all(x() is not None for x in kept), "the graph holds them"
    o.backward(weights.to(o.dtype))
    return {name: x.grad for name, x in leaves.items()}, kept


@pytest.mark.usefixtures("one_thread")
def test_a_kept_table_spares_prepare_and_changes_no_bit(runs: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    call = inputs.raw(1, 70, 1, 64, dtype=torch.float32)
    runs.clear()
    expected, kept = kernels_gradients(call)
    assert not kept and runs["prepare.prepare"] == 2, "by default the inputs alone are saved"

    monkeypatch.setenv("KDA_KEEP_TABLE", "on")
    runs.clear()
    actual, kept = kernels_gradients(call)
    assert runs["prepare.prepare"] == 1 and runs["backward.prepare.prepare"] == 1
    assert len(kept) == 2 and not any(x() is not None for x in kept), "and freed behind the backward pass"
    assert set(actual) == set(expected) and all(torch.equal(actual[name], x) for name, x in expected.items())

    # fp16: its gradients are computed in bf16, for which the table of the forward pass is of no use.
    _, kept = kernels_gradients(inputs.raw(1, 70, 1, 64, dtype=torch.float16))
    assert not kept

    monkeypatch.setenv("KDA_KEEP_TABLE", "maybe")
    with pytest.raises(ValueError, match=r"^KDA_KEEP_TABLE: expected one of 1, .* got 'maybe'$"):
        kernels_gradients(call)


@pytest.mark.usefixtures("one_thread", "runs")
def test_the_layer_by_kernels_kept_checkpointed_and_both(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = KimiDeltaAttention(8, 1, 64, backend="tilelang"), torch.randn(2, 70, 8)
    expected = layers_gradients(layer, x)
    for keep, recompute in (("0", True), ("1", False), ("1", True)):
        monkeypatch.setenv("KDA_KEEP_TABLE", keep)
        actual = layers_gradients(layer, x, recompute=recompute)
        assert all(torch.equal(actual[name], gradient) for name, gradient in expected.items()), (keep, recompute)
    layer.backend = "torch"
    for name, gradient in layers_gradients(layer, x).items():
        torch.testing.assert_close(expected[name], gradient, rtol=1e-4, atol=1e-7, msg=name)
