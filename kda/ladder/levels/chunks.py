"""Between tokens and chunks, and the states that enter the chunks."""

from __future__ import annotations

import torch
from torch import Tensor


def split(x: Tensor, BC: int) -> Tensor:
    """`[B, N, H, ...]` as fp64 chunks `[B, H, NC, BC, ...]`, the last one filled up with zeros."""
    x = x.double().movedim(1, 2)
    B, H, N, *rest = x.shape
    padded = x.new_zeros(B, H, -(-N // BC) * BC, *rest)
    padded[:, :, :N] = x
    return padded.unflatten(2, (-1, BC))


def join(x: Tensor, N: int) -> Tensor:
    """`[B, H, NC, BC, V]` as tokens `[B, N, H, V]`."""
    return x.flatten(2, 3)[:, :, :N].transpose(1, 2).contiguous()


def entering_states(decay: Tensor, kg: Tensor, v: Tensor) -> Tensor:
    """The state before each chunk `[B, H, NC, K, V]` of S <- decay S + kgᵀ v, from zero.

    decay broadcasts against `[B, H, NC, K, 1]`; kg `[B, H, NC, BC, K]`, v `[B, H, NC, BC, V]`.
    """
    written = kg.mT @ v
    decay = decay.expand(*written.shape[:-1], 1)
    states = torch.zeros_like(written)
    for c in range(1, written.shape[2]):
        states[:, :, c] = decay[:, :, c - 1] * states[:, :, c - 1] + written[:, :, c - 1]
    return states
