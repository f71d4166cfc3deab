"""What the checks have in common: each raises an error that names the argument, what was expected and what came."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTS = (torch.int32, torch.int64)


def shape_of(x: Tensor) -> str:
    return str(list(x.shape))


def dtypes_of(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dict.fromkeys(dtypes))


def require_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"{name}: expected a dense tensor, got {'a nested one' if x.is_nested else x.layout}")


def require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        kind = type(value)
        named = f"{kind.__module__}.bool" if kind.__name__ == "bool" else kind.__name__  # numpy has one too
        raise TypeError(f"{name}: expected a bool, got {named}")


def require_number(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number or None, got {type(value).__name__}")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an int beyond the floats
        finite = False
    if not finite:
        raise ValueError(f"{name}: expected a finite number, got {value}")


def require_dtype(name: str, x: Tensor, *allowed: torch.dtype) -> None:
    if x.dtype not in allowed:
        raise TypeError(f"{name}: expected dtype {dtypes_of(allowed)}, got {dtypes_of((x.dtype,))}")


def require_shape(name: str, x: Tensor, shape: tuple[int, ...], spelled: str) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {spelled} = {list(shape)}, got {shape_of(x)}")


def require_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name}: expected device {q.device} as q, got {x.device}")
