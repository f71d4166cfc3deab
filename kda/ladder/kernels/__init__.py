"""The kernels of the ladder's levels 1 to 4, for Hopper GPUs and, in float32, for the CPU. Level 5 is the backend.

One build serves every batch, length and number of heads; it is made when first needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kda.backends.tilelang.build import CPU, HOPPER, build, target_for
from kda.backends.tilelang.host import aligned

__all__ = ["BLOCK_V", "HEAD_DIMS", "KERNELS", "run"]

KERNELS = {
    1: ("linattn_chunk", "linattn_seq_in_loop"),
    2: ("decay_seq_in_loop",),
    3: ("gate_seq_in_loop",),
    4: ("delta_seq_in_loop",),
}
"""Level -> the names of its kernels."""

HEAD_DIMS = (64, 128)
BLOCK_V = 32
"""Columns of the state to a block of the kernels that have the sequence in their loop."""

GRID_LIMIT = 65535
"""What the second and the third axis of a CUDA grid can count: heads and sequences."""


def run(name: str, q: Tensor, k: Tensor, v: Tensor, *gate: Tensor) -> Tensor:
    """o `[B, N, H, V]` of kernel `name`, as the level's reference defines it (`kda.ladder.levels`).

    q, k `[B, N, H, K]` and v `[B, N, H, V]` of one dtype, fp16 or bf16 on CUDA, fp32 on the CPU; K and V 64 or 128.
    `gate`, fp32: g `[H]` for level 2, g `[B, N, H, K]` for level 3, beta `[B, N, H]` for level 4. Raises ValueError for
    anything else.
    """
    target = target_for(q.device)
    _check(name, q, k, v, gate, target)
    kernel = _kernel(name, q.shape[3], v.shape[3], str(q.dtype).removeprefix("torch."), target)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(q):
        kernel(*(aligned(x, x.dtype) for x in (q, k, v, *gate)), o)
    return o


def _check(name: str, q: Tensor, k: Tensor, v: Tensor, gate: tuple[Tensor, ...], target: str) -> None:
    B, N, H, K = q.shape
    if target not in (CPU, HOPPER):
        raise ValueError(f"q: expected on the CPU or a Hopper GPU ({HOPPER}), got {target}")
    dtypes = (torch.float32,) if target == CPU else (torch.float16, torch.bfloat16)
    if q.dtype not in dtypes or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k, v: expected one dtype of {dtypes}, got {q.dtype}, {k.dtype}, {v.dtype}")
    if k.shape != q.shape or v.shape[:3] != q.shape[:3]:
        shapes = [list(x.shape) for x in (q, k, v)]
        raise ValueError(f"q, k, v: expected [B, N, H, K] twice and [B, N, H, V], got {shapes}")
    if K not in HEAD_DIMS or v.shape[3] not in HEAD_DIMS or not q.numel():
        raise ValueError(f"q, v: expected tokens and heads of {HEAD_DIMS}, got {list(q.shape)} and {list(v.shape)}")
    if max(B, H) > GRID_LIMIT:
        raise ValueError(f"q: expected at most {GRID_LIMIT} sequences and heads, got {B} and {H}")
    shapes = {"decay_seq_in_loop": (H,), "gate_seq_in_loop": (B, N, H, K), "delta_seq_in_loop": (B, N, H)}
    expected = [list(shapes[name])] if name in shapes else []
    if [list(x.shape) for x in gate] != expected or any(x.dtype != torch.float32 for x in gate):
        raise ValueError(f"gate: expected fp32 {expected}, got {[(x.dtype, list(x.shape)) for x in gate]}")


def _kernel(name: str, K: int, V: int, dtype: str, target: str) -> Callable[..., None]:
    level = next(level for level, names in KERNELS.items() if name in names)
    width = {"threads": 2 * V} if name == "linattn_chunk" else {"block_V": BLOCK_V}
    return build(target, f"{__name__}.level{level}.{name}", K=K, V=V, dtype=dtype, **width)
