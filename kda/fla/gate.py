"""FLA's stand-alone gate: the log decay from the raw gate, differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda import backends


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """-exp(A_log) softplus(g + dt_bias), or with `lower_bound`, lower_bound sigmoid(exp(A_log) (g + dt_bias)).

    Computed in fp32 by PyTorch operations on any device.

    Args:
        g: `[..., H, K]`, any float dtype.
        A_log: H elements in any shape and float dtype; may be None (factor 1) beside `lower_bound`.
        dt_bias: H·K elements in any shape and float dtype, or None.
        lower_bound: any number below 0, or None.
        output_dtype: of the result.

    Returns:
        The log decay `[..., H, K]`, natural logarithm.

    Raises:
        ValueError: A_log and lower_bound are both None, or a size does not fit g.
    """
    if A_log is None and lower_bound is None:
        raise ValueError("`A_log` must be provided when `lower_bound` is not set: expected a tensor, got None")
    H, K = g.shape[-2:]
    for name, x, size in (("A_log", A_log, H), ("dt_bias", dt_bias, H * K)):
        if x is not None and x.numel() != size:
            raise ValueError(f"{name}: expected {size} elements beside g {list(g.shape)}, got {list(x.shape)}")
    formula: Any = backends.load("torch")  # whose formula it is; the protocol of backends has no gate by itself
    rows = g.float().unsqueeze(-2)
    decay = formula.gate(
        rows,
        None if A_log is None else A_log.float().reshape(H),
        None if dt_bias is None else dt_bias.float().reshape(H, K),
        lower_bound,
    )
    return decay.squeeze(-2).to(output_dtype)
