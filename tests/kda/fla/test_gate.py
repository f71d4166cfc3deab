"""FLA's stand-alone gate."""

from __future__ import annotations

import pytest
import torch

from kda.fla import fused_kda_gate
from kda.golden.activation import Activation

H, K = 3, 5


def parameters(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return tuple(3 * torch.randn(shape).to(dtype) for shape in ((2, 7, H, K), (1, 1, H, 1), (H * K,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lower_bound", [None, -5.0, -10.0])
@pytest.mark.parametrize("bias", [True, False])
def test_the_formula(dtype: torch.dtype, lower_bound: float | None, bias: bool) -> None:
    g, A_log, dt_bias = parameters(dtype)
    b = dt_bias.view(H, K) if bias else None
    golden = Activation(use_gate_in_kernel=True, A_log=A_log.view(H, 1), dt_bias=b, lower_bound=lower_bound)
    y = fused_kda_gate(g, A_log, dt_bias if bias else None, lower_bound)
    assert y.dtype == torch.float32 and y.shape == g.shape
    torch.testing.assert_close(y.double(), golden.unbounded_log_decay(g), rtol=1e-5, atol=1e-6)
    assert fused_kda_gate(g, A_log, None, lower_bound, torch.bfloat16).dtype == torch.bfloat16


def test_without_a_rate() -> None:
    g, _, dt_bias = parameters(torch.float32)
    expected = -5 * torch.sigmoid(g + dt_bias.view(H, K))
    torch.testing.assert_close(fused_kda_gate(g, None, dt_bias, -5.0), expected)
    with pytest.raises(ValueError, match="`A_log` must be provided"):
        fused_kda_gate(g)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_its_gradients(lower_bound: float | None) -> None:
    x = [leaf.requires_grad_() for leaf in parameters(torch.float32)]
    y = [leaf.detach().double().requires_grad_() for leaf in x]
    A_log, dt_bias = y[1].view(H, 1), y[2].view(H, K)
    golden = Activation(use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
    weight = torch.randn(2, 7, H, K)
    (fused_kda_gate(*x, lower_bound) * weight).sum().backward()
    (golden.unbounded_log_decay(y[0]) * weight).sum().backward()
    for ours, theirs in zip(x, y, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-4)


def test_sizes_are_checked() -> None:
    g, A_log, dt_bias = parameters(torch.float32)
    with pytest.raises(ValueError, match=r"A_log: expected 3 elements beside g \[2, 7, 3, 5\], got \[1, 1, 2, 1\]"):
        fused_kda_gate(g, A_log[:, :, :2])
    with pytest.raises(ValueError, match="dt_bias: expected 15 elements"):
        fused_kda_gate(g, A_log, dt_bias[:3])
