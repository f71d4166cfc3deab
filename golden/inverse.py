"""M2, the inverse: Ainv = (I + Akk)⁻¹, which resolves how the tokens of a chunk correct one another."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse(Akk: Tensor) -> Tensor:
    """Unit lower triangular `[..., C, C]`, by forward substitution."""
    eye = torch.eye(Akk.shape[-1], dtype=Akk.dtype, device=Akk.device)
    return torch.linalg.solve_triangular(eye + Akk, eye.expand_as(Akk), upper=False, unitriangular=True)
