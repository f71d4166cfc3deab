"""The ladder's kernels on the device: every level against its reference, with tails and strong gates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kda.golden import rel_rmse
from kda.golden.constants import CHUNK_SIZE
from kda.ladder.consistency import FORMS, arguments, inputs
from kda.ladder.timing import ERROR_LIMIT

pytest.importorskip("tilelang")

from kda.ladder import kernels

KERNELS = [(level, name) for level, names in kernels.KERNELS.items() for name in names]
each_kernel = pytest.mark.parametrize(("level", "name"), KERNELS, ids=[name for _, name in KERNELS])


def call(level: int, N: int, dtype: torch.dtype, *, H: int = 3, K: int = 64, V: int = 128) -> tuple[Tensor, ...]:
    """Two sequences, drawn by their length; q, k, v in dtype, the rest in fp32."""
    x = arguments(level, inputs(B=2, N=N, H=H, K=K, V=V, seed=N))
    return tuple(t.to("cuda", dtype if i < 3 else torch.float32) for i, t in enumerate(x))


def check(level: int, name: str, x: tuple[Tensor, ...]) -> None:
    o = kernels.run(name, *x)
    assert o.dtype == x[0].dtype and o.isfinite().all()
    assert rel_rmse(o, FORMS[level][1](*x, CHUNK_SIZE)) <= ERROR_LIMIT


@each_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("N", [1, 63, 64, 65, 200, 1000, 1024])
def test_lengths(level: int, name: str, dtype: torch.dtype, N: int) -> None:
    check(level, name, call(level, N, dtype))


@each_kernel
def test_wide_keys(level: int, name: str) -> None:
    check(level, name, call(level, 333, torch.bfloat16, H=5, K=128, V=64))


@pytest.mark.parametrize("level", [2, 3])
def test_strong_gates(level: int) -> None:
    """From no decay to minus infinity; level 3 has all of it side by side."""
    strong = torch.tensor([0.0, -1e-3, -5.0, -1000.0, -math.inf], device="cuda")
    q, k, v, g = call(level, 300, torch.bfloat16, H=5)
    g = strong if level == 2 else strong[torch.randint(5, g.shape, generator=torch.Generator().manual_seed(0))]
    check(level, kernels.KERNELS[level][0], (q, k, v, g))


@each_kernel
def test_sequences_do_not_meet(level: int, name: str) -> None:
    """Behind a sequence's last chunk the memory holds the next sequence: of NaN here."""
    x = call(level, 70, torch.bfloat16)
    expected = kernels.run(name, *x)[0]
    for tensor in x:
        if tensor.dim() > 1:
            tensor[1] = math.nan
    assert torch.equal(kernels.run(name, *x)[0], expected)


@each_kernel
def test_20_runs_give_one_set_of_bits(level: int, name: str) -> None:
    x = call(level, 1000, torch.bfloat16)
    first = kernels.run(name, *x)
    for _ in range(20):
        assert torch.equal(kernels.run(name, *x), first)
