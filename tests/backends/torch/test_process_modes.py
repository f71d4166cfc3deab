"""Whatever a process has set by default, the torch backend, its gradients and the layer compute the same."""

from __future__ import annotations

import pytest
import torch
from process_modes import MODES, check

import kda
from kda.golden import inputs
from kda.nn import KimiDeltaAttention

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("mode", MODES)
def test_results(mode: str) -> None:
    check(mode, "torch")


# Not autocast either, since torch's own products in a backward pass heed it: it is no place to call backward() from.
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("no grad", "inference", "autocast")])
def test_gradients(mode: str) -> None:
    def gradients() -> list[torch.Tensor]:
        call = inputs.raw(1, 12, 1, 16, dtype=torch.float32, lengths=[5, 7], initial_state=True)
        leaves = {name: call[name].clone().requires_grad_() for name in ("q", "k", "v", "g", "beta", "initial_state")}
        o, state = kda.chunk_kda(**call | leaves)
        (o.square().sum() + state.square().sum()).backward()
        return [x.grad for x in leaves.values()]

    expected = gradients()
    with MODES[mode]():
        for actual, x in zip(gradients(), expected, strict=True):
            assert torch.equal(actual, x)


@pytest.mark.parametrize(
    "mode", ["bf16 by default", "fp64 by default", "meta by default", "inference", "deterministic"]
)
def test_the_layer(mode: str) -> None:
    torch.manual_seed(0)
    layer = KimiDeltaAttention(16, 2, 8)
    x, cu_seqlens = torch.randn(1, 9, 16), torch.tensor([0, 4, 7])
    expected, cache = layer(x, cu_seqlens=cu_seqlens, output_cache=True)
    with MODES[mode]():
        y, mine = layer(x, cu_seqlens=cu_seqlens, output_cache=True)
        assert torch.equal(y, expected) and torch.equal(mine.state, cache.state)
