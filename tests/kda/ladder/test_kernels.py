"""The ladder's kernels, executed on the CPU in float32 and held to the references, and compiled for Hopper."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from torch import Tensor

from kda.golden import rel_rmse
from kda.ladder.consistency import FORMS, arguments, inputs

pytest.importorskip("tilelang")

from kda.backends.tilelang.build import HOPPER, build
from kda.ladder import kernels

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-6
"""Relative L2: a few roundings in float32."""

KERNELS = [(level, name) for level, names in kernels.KERNELS.items() for name in names]
each_kernel = pytest.mark.parametrize(("level", "name"), KERNELS, ids=[name for _, name in KERNELS])


def call(level: int, N: int, seed: int = 0) -> tuple[Tensor, ...]:
    return tuple(x.float() for x in arguments(level, inputs(B=2, N=N, H=2, K=64, V=128, seed=seed)))


@each_kernel
@pytest.mark.parametrize("N", [1, 63, 64, 65, 200])
def test_against_the_reference(level: int, name: str, N: int) -> None:
    x = call(level, N, seed=N)
    o = kernels.run(name, *x)
    assert o.shape == x[2].shape and rel_rmse(o, FORMS[level][0](*x)) <= TOLERANCE


@each_kernel
def test_sequences_do_not_meet(level: int, name: str) -> None:
    """Behind a sequence's last chunk the memory holds the next sequence: of NaN here."""
    x = call(level, 70)
    expected = kernels.run(name, *x)
    for tensor in x:
        if tensor.shape[0] == 2 and tensor.dim() > 1:
            tensor[1] = math.nan
    assert torch.equal(kernels.run(name, *x)[0], expected[0])


@pytest.mark.parametrize(("level", "tolerance"), [(2, TOLERANCE), (3, 1e-4)])  # level 3: what fp32 sums of gates keep
def test_strong_gates(level: int, tolerance: float) -> None:
    """No decay, -inf and what lies between; level 3 has all of them side by side."""
    q, k, v, g = call(level, 150)
    strong = torch.tensor([0.0, -1e-3, -5.0, -1000.0, -math.inf])
    if level == 3:
        gates = [strong[torch.randint(5, g.shape, generator=torch.Generator().manual_seed(0))]]
    else:
        gates = [strong[i : i + 2] for i in range(4)]
    for g in gates:
        o = kernels.run(kernels.KERNELS[level][0], q, k, v, g)
        assert o.isfinite().all() and rel_rmse(o, FORMS[level][0](q, k, v, g)) <= tolerance


def test_strided_inputs() -> None:
    q, k, v = call(1, 70)
    expected = kernels.run("linattn_seq_in_loop", q, k, v)
    apart = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert torch.equal(kernels.run("linattn_seq_in_loop", *apart), expected)


def wrong(**changes: Tensor) -> list[Tensor]:
    tensors = dict(zip("qkvg", (torch.zeros(1, 3, 2, 64), torch.zeros(1, 3, 2, 64), torch.zeros(1, 3, 2, 64),
                                torch.zeros(2)), strict=True))  # fmt: skip
    return list((tensors | changes).values())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (wrong(k=torch.zeros(1, 3, 2, 128)), "q, k, v: expected"),
        (wrong(v=torch.zeros(1, 4, 2, 64)), "q, k, v: expected"),
        (wrong(q=torch.zeros(1, 3, 2, 64).half()), "q, k, v: expected one dtype"),
        (wrong(v=torch.zeros(1, 3, 2, 32)), r"expected .* heads of \(64, 128\)"),
        (wrong(q=torch.zeros(1, 0, 2, 64), k=torch.zeros(1, 0, 2, 64), v=torch.zeros(1, 0, 2, 64)), "expected tokens"),
        (wrong(g=torch.zeros(3)), r"gate: expected fp32 \[\[2\]\]"),
        (wrong(g=torch.zeros(2).double()), "gate: expected fp32"),
    ],
)
def test_wrong_calls(tensors: list[Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.run("decay_seq_in_loop", *tensors)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@each_kernel
def test_compiles_for_hopper(level: int, name: str) -> None:
    width = {"threads": 128} if name == "linattn_chunk" else {"block_V": kernels.BLOCK_V}
    builder = f"{kernels.__name__}.level{level}.{name}"
    assert build(HOPPER, builder, K=64, V=64, dtype=torch.bfloat16, **width) is not None
