"""Whether this machine has what the kernels need: TileLang, and a CUDA device or the wish to do without one."""

from __future__ import annotations

import functools
import importlib.util

import torch

from kda.backends.environment import emulating


@functools.cache
def missing_tilelang() -> str | None:
    """Why there is no TileLang, or None."""
    if importlib.util.find_spec("tilelang") is None:
        return "tilelang is not installed (the extra `cuda`)"
    return None


def missing_device() -> str | None:
    """Why no GPU can be used, or None; the kernels on CPU tensors need none."""
    if emulating() or _has_cuda():
        return None
    return "there is no CUDA device (KDA_EMULATE=1 runs the kernels on CPU tensors, slowly)"


@functools.cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()
