"""The backend that runs anywhere: plain PyTorch, with autograd. It takes every call that the front end lets through."""

from __future__ import annotations

from kda.backends.call import KdaCall

from .chunk import chunk_kda, stages
from .recurrent import fused_recurrent_kda

__all__ = ["about", "chunk_kda", "differentiable", "fused_recurrent_kda", "refuses", "stages", "unusable"]

about = "plain PyTorch on any device, with autograd"
differentiable = True


def unusable() -> list[str]:
    """Why the backend cannot run on this machine: never."""
    return []


def refuses(call: KdaCall) -> list[str]:
    """Why it cannot take the call: it takes every one."""
    return []
