"""Padded rows, NaN included, reach no real row's output, no state and no gradient; masks equal the sequences alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kda.golden import rel_rmse
from kda.nn import KimiDeltaAttention

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN = 24
MASKS = {
    "left": [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]],
    "right": [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]],
    "holes": [[1, 0, 1, 0, 1, 0], [0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0]],
}


def run(m: KimiDeltaAttention, x: Tensor, **padding: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """y, the state, and the gradients of x and of every parameter; what comes back for padded rows is NaN."""
    m.zero_grad()
    x = x.clone().requires_grad_()
    y, cache = m(x, output_cache=True, **padding)
    weight = torch.linspace(-1, 1, y.numel()).view(y.shape)
    upstream = torch.where(real_rows(x, **padding)[..., None], weight, torch.nan)
    torch.autograd.backward([y, cache.state], [upstream, torch.ones_like(cache.state)])
    return y.detach(), cache.state.detach(), [x.grad, *(p.grad for p in m.parameters())]


def real_rows(x: Tensor, attention_mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    if attention_mask is not None:
        return attention_mask.bool()
    token = torch.arange(x.shape[1])
    return ((token >= cu_seqlens[0]) & (token < cu_seqlens[-1]))[None]


def layer() -> KimiDeltaAttention:
    torch.manual_seed(0)
    return KimiDeltaAttention(HIDDEN, 2, 8)


@pytest.mark.parametrize("kind", [*MASKS, "packed", "packed, from 2 on"])
def test_nan_in_padding_changes_nothing(kind: str) -> None:
    m = layer()
    if kind in MASKS:
        padding = {"attention_mask": torch.tensor(MASKS[kind])}
        x = torch.randn(3, 6, HIDDEN)
    else:
        padding = {"cu_seqlens": torch.tensor([0, 3, 3, 7]) + (2 if "from" in kind else 0)}
        x = torch.randn(1, 12, HIDDEN)
    real = real_rows(x, **padding)
    poisoned = torch.where(real[..., None], x, torch.nan)
    expected_y, expected_state, expected = run(m, torch.where(real[..., None], x, 0.0), **padding)
    y, state, gradients = run(m, poisoned, **padding)
    assert torch.equal(y, expected_y) and torch.equal(state, expected_state)
    assert not y[~real].any() and not gradients[0][~real].any()
    for actual, gradient in zip(gradients, expected, strict=True):
        assert actual.isfinite().all() and torch.equal(actual, gradient)


@pytest.mark.parametrize("kind", MASKS)
def test_a_mask_means_the_real_rows_alone(kind: str) -> None:
    m, x, mask = layer(), torch.randn(3, 6, HIDDEN), torch.tensor(MASKS[kind]).bool()
    y, cache = m(x, attention_mask=mask, output_cache=True)
    then = torch.randn(3, 1, HIDDEN)
    after, _ = m(then, cache)
    for b in range(3):
        if mask[b].any():
            alone, own = m(x[b : b + 1, mask[b]], output_cache=True)
            assert rel_rmse(y[b : b + 1, mask[b]], alone) <= 1e-6
            assert rel_rmse(after[b : b + 1], m(then[b : b + 1], own)[0]) <= 1e-6
        else:
            assert not cache.state[b].any()


def test_a_mask_compiles_as_one_graph() -> None:
    m, x, mask = layer(), torch.randn(3, 6, HIDDEN), torch.tensor(MASKS["left"])
    y, _ = torch.compile(m, backend="aot_eager", fullgraph=True)(x, attention_mask=mask)
    assert rel_rmse(y, m(x, attention_mask=mask)[0]) <= 1e-6
