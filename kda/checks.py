"""From a user's arguments to a `KdaCall`: every check that shapes, dtypes, devices and strides alone can decide.

No tensor value is read here, so a call can be captured in a CUDA graph. `KDA_CHECK=1` adds `kda.value_checks`.
"""

from __future__ import annotations

from collections.abc import Hashable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from kda.backends import environment
from kda.backends.call import ARGUMENTS, OPS, PER_TOKEN, KdaCall, Op, state_dtype
from kda.golden.constants import LOWER_BOUND_RANGE
from kda.require import (
    FLOATS,
    INTS,
    require_bool,
    require_device,
    require_dtype,
    require_number,
    require_shape,
    require_tensor,
    shape_of,
)
from kda.state_checks import check_states, check_written
from kda.value_checks import check_values

_DEFAULTS = {op: {a.name: a.default for a in ARGUMENTS[op] if a.optional} for op in OPS}
_TENSORS = {op: itemgetter(*(a.name for a in ARGUMENTS[op] if a.kind in ("Tensor", "Tensor?"))) for op in OPS}
_WITH_BATCH = (*PER_TOKEN, "out")  # all with the batch axis, or all without it
_FLAGS = {op: tuple(a.name for a in ARGUMENTS[op] if a.kind == "bool") for op in OPS}
_NUMBERS = {op: tuple(a.name for a in ARGUMENTS[op] if a.kind == "float?") for op in OPS}
_FLAGS_OF = {op: itemgetter(*names) for op, names in _FLAGS.items()}
_NUMBERS_OF = {op: itemgetter(*names, "null_slot") for op, names in _NUMBERS.items()}


def checked(op: Op, /, **given: Any) -> KdaCall:
    """Check the arguments of `op` and return the batched call.

    Raises ValueError for shapes, values and combinations, TypeError for dtypes and for what is not a tensor.
    """
    values = given if len(given) == len(ARGUMENTS[op]) else _DEFAULTS[op] | given
    signature, memo = _look_up(op, values)
    if memo is None:
        _check_arguments(op, values)
    q = values["q"]
    if q.dim() == 3:
        values |= {name: values[name].unsqueeze(0) for name in _WITH_BATCH if values[name] is not None}
    values["scale"] = q.shape[-1] ** -0.5 if values["scale"] is None else float(values["scale"])
    if values["lower_bound"] is not None:
        values["lower_bound"] = float(values["lower_bound"])
    for name in ("A_log", "dt_bias"):
        if (x := values[name]) is not None and x.ndim != 1:
            values[name] = x.reshape(-1)
    call = KdaCall(op=op, memo={} if memo is None else memo, **values)
    if memo is None:
        _check_flags(call)
        check_states(call)
        _remember(signature, call.memo)
    check_written(call)
    if environment.checking() and not isinstance(q, FakeTensor) and q.device.type != "meta":
        check_values(call)
    return call


_passed: dict[Hashable, dict[Any, Any]] = {}
"""Signature of each call that passed -> the memo of such calls. Models make the same call again and again, and the
checks would take as long as the launch."""

_MAX_PASSED = 4096


def _look_up(op: Op, values: dict[str, Any]) -> tuple[Hashable, dict[Any, Any] | None]:
    """The signature, all that the checks look at but strides and autograd, and the memo if such a call has passed.

    (None, None) where an argument is no such thing as they expect: it is for the checks to say so.
    """
    flags, numbers = _FLAGS_OF[op](values), _NUMBERS_OF[op](values)
    if set(map(type, flags)) != {bool}:  # 1 == True, but is no flag
        return None, None
    try:
        described = [None if x is None else (x.shape, x.dtype, x.device, x.layout) for x in _TENSORS[op](values)]
        signature = (op, flags, numbers, *map(type, numbers), *described)
        return signature, _passed.get(signature)
    except (AttributeError, KeyError, RuntimeError, TypeError):
        return None, None


def _remember(signature: Hashable, memo: dict[Any, Any]) -> None:
    if signature is not None:
        if len(_passed) >= _MAX_PASSED:
            _passed.clear()
        _passed[signature] = memo


def _check_arguments(op: Op, values: dict[str, Any]) -> None:
    """What can be said of the arguments one by one and against q, before they make a call."""
    q, k, v, g, beta = (values[name] for name in PER_TOKEN)
    for name in PER_TOKEN:
        require_tensor(name, values[name])
    if (cu_seqlens := values["cu_seqlens"]) is not None:
        check_cu_seqlens(cu_seqlens, q)
    _check_ranks(q, k, v, g, beta, packed=cu_seqlens is not None)
    _check_inputs(q, k, v, g, beta)
    _check_parameters(values["A_log"], values["dt_bias"], q, v)
    if (out := values["out"]) is not None:
        require_tensor("out", out)
        require_dtype("out", out, v.dtype)
        require_shape("out", out, tuple(v.shape), "v's")
        require_device("out", out, q)
    for name in _NUMBERS[op]:
        require_number(name, values[name])
    for name in _FLAGS[op]:
        require_bool(name, values[name])


def _check_ranks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, packed: bool) -> None:
    if q.dim() not in ((3, 4) if packed else (4,)):
        expected = "[T, H, K] or [1, T, H, K] (cu_seqlens is given)" if packed else "[B, T, H, K]"
        hint = "; a packed [T, H, K] needs cu_seqlens" if q.dim() == 3 else ""
        raise ValueError(f"q: expected {expected}, got rank {q.dim()} with shape {shape_of(q)}{hint}")
    if packed and q.dim() == 4 and q.shape[0] != 1:
        raise ValueError(f"q: expected batch size 1 beside cu_seqlens, got shape {shape_of(q)}")
    for name, x, rank in (("k", k, q.dim()), ("v", v, q.dim()), ("g", g, q.dim()), ("beta", beta, q.dim() - 1)):
        if x.dim() != rank:
            raise ValueError(f"{name}: expected rank {rank} beside q of rank {q.dim()}, got shape {shape_of(x)}")


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    *rows, H, K = q.shape
    HV, V = v.shape[-2:]
    BT = "B, T" if q.dim() == 4 else "T"
    if min(H, K) < 1:
        raise ValueError(f"q: expected H >= 1 and K >= 1, got shape {shape_of(q)}")
    require_shape("k", k, (*rows, H, K), f"[{BT}, H, K] as q")
    require_shape("v", v, (*rows, HV, V), f"[{BT}, HV, V] beside q")
    if HV < 1 or V < 1 or HV % H:
        raise ValueError(f"v: expected HV a positive multiple of H = {H} and V >= 1, got HV = {HV}, V = {V}")
    require_shape("g", g, (*rows, HV, K), f"[{BT}, HV, K]")
    require_shape("beta", beta, (*rows, HV), f"[{BT}, HV]")
    require_dtype("q", q, *FLOATS)
    require_dtype("k", k, q.dtype)
    require_dtype("v", v, q.dtype)
    require_dtype("g", g, torch.float32, q.dtype)
    require_dtype("beta", beta, torch.float32, q.dtype)
    for name, x in (("k", k), ("v", v), ("g", g), ("beta", beta)):
        require_device(name, x, q)


def _check_parameters(A_log: Tensor | None, dt_bias: Tensor | None, q: Tensor, v: Tensor) -> None:
    HV, K = v.shape[-2], q.shape[-1]
    for name, x, spelled, size in (("A_log", A_log, "HV", HV), ("dt_bias", dt_bias, "HV * K", HV * K)):
        if x is not None:
            require_tensor(name, x)
            require_dtype(name, x, torch.float32, state_dtype(q.dtype))
            require_device(name, x, q)
            if x.numel() != size:
                raise ValueError(f"{name}: expected {spelled} = {size} elements, got {shape_of(x)}")


def check_cu_seqlens(cu: Tensor, q: Tensor) -> None:
    require_tensor("cu_seqlens", cu)
    require_dtype("cu_seqlens", cu, *INTS)
    if cu.dim() != 1 or cu.shape[0] < 2:
        raise ValueError(f"cu_seqlens: expected shape [N + 1] with N >= 1, got {shape_of(cu)}")
    require_device("cu_seqlens", cu, q)


def _check_flags(call: KdaCall) -> None:
    if call.use_gate_in_kernel:
        if call.A_log is None and call.lower_bound is None:
            raise ValueError("A_log: expected a tensor of HV elements with use_gate_in_kernel (only with lower_bound "
                             "may it be None), got None")  # fmt: skip
    else:
        for name in ("A_log", "dt_bias", "lower_bound"):
            if (value := getattr(call, name)) is not None:
                raise ValueError(f"{name}: expected None without use_gate_in_kernel=True, got {type(value).__name__}")
    low, high = LOWER_BOUND_RANGE
    if call.lower_bound is not None and not low <= call.lower_bound < high:
        raise ValueError(f"lower_bound: expected a value in [{low:g}, {high:g}), got {call.lower_bound}")
    if call.allow_neg_eigval and not call.use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True beside it, got False")
