"""The short convolution of the layer `kda.nn.KimiDeltaAttention`, which knows packed sequences and continues others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ShortConvolution(nn.Conv1d):
    """Causal depthwise convolution over time, then SiLU: y[t] = silu(sum_j weight[:, 0, j] * x[t - (W - 1) + j])."""

    def __init__(self, channels: int, kernel_size: int, **factory: Any) -> None:
        """`factory`: `device` and `dtype` of the weight, as for other modules."""
        super().__init__(channels, channels, kernel_size, groups=channels, bias=False, **factory)

    def forward(  # type: ignore[override]  # it returns what the next call continues from as well
        self, x: Tensor, tail: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Args:
            x: `[B, T, C]`; with `cu_seqlens` `[1, T, C]`.
            tail: `[N, W - 1, C]`, the inputs before each sequence's first; zeros if None.
            cu_seqlens: int32 or int64 `[N + 1]`.

        Returns:
            y as x (with `cu_seqlens`, rows past its last value are of no meaning), and the next call's `tail`.
        """  # fmt: skip
        (B, T, C), past = x.shape, self.kernel_size[0] - 1
        N = B if cu_seqlens is None else len(cu_seqlens) - 1
        tail = x.new_zeros(N, past, C) if tail is None else tail.to(x.dtype)
        if cu_seqlens is None:
            window = torch.cat([tail, x], dim=1)
            return self._slide(window), window[:, T:].clone()
        # Each sequence behind its own tail in one buffer, so that none reaches into its neighbour; padding comes last.
        cu = cu_seqlens.long()
        tokens = torch.arange(T, device=x.device)
        rows = tokens + past * torch.searchsorted(cu, tokens, right=True)
        behind = past * torch.arange(N, device=x.device)[:, None] + torch.arange(past, device=x.device)
        window = x.new_zeros(1, T + past * (N + 1), C).index_copy(1, rows, x)
        window = window.index_copy(1, (cu[:-1, None] + behind).flatten(), tail.reshape(1, N * past, C))
        return self._slide(window)[:, rows - past], window[0, cu[1:, None] + behind]

    def _slide(self, window: Tensor) -> Tensor:
        # Shifted products keep the channels contiguous, as the operators read them; a convolution transposes twice.
        W, weight = self.kernel_size[0], self.weight.to(window.dtype)
        T = window.shape[1] - W + 1
        shifted = (window[:, j : j + T] * weight[:, 0, j] for j in range(1, W))
        return F.silu(sum(shifted, window[:, :T] * weight[:, 0, 0]))
