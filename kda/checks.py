"""From a user's arguments to a `KdaCall`: every check that shapes, dtypes, devices and strides alone can decide.

No tensor value is read here, so a call can be captured in a CUDA graph. `KDA_CHECK=1` adds `kda.value_checks`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from numbers import Real
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from kda.backends import environment
from kda.backends.call import ARGUMENTS, DIFFERENTIABLE, OPS, PER_TOKEN, KdaCall, Op, state_dtype
from kda.golden.constants import LOWER_BOUND_RANGE
from kda.value_checks import check_values

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTS = (torch.int32, torch.int64)

_DEFAULTS = {op: {a.name: a.default for a in ARGUMENTS[op] if a.optional} for op in OPS}
_TENSORS = {op: itemgetter(*(a.name for a in ARGUMENTS[op] if a.kind in ("Tensor", "Tensor?"))) for op in OPS}
_FLAGS = {op: tuple(a.name for a in ARGUMENTS[op] if a.kind == "bool") for op in OPS}
_NUMBERS = {op: tuple(a.name for a in ARGUMENTS[op] if a.kind == "float?") for op in OPS}
_FLAGS_OF = {op: itemgetter(*names) for op, names in _FLAGS.items()}
_NUMBERS_OF = {op: itemgetter(*names) for op, names in _NUMBERS.items()}


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
        values |= {name: values[name].unsqueeze(0) for name in PER_TOKEN}
    values["scale"] = q.shape[-1] ** -0.5 if values["scale"] is None else float(values["scale"])
    if values["lower_bound"] is not None:
        values["lower_bound"] = float(values["lower_bound"])
    for name in ("A_log", "dt_bias"):
        if (x := values[name]) is not None and x.ndim != 1:
            values[name] = x.reshape(-1)
    call = KdaCall(op=op, memo={} if memo is None else memo, **values)
    if memo is None:
        _check_flags(call)
        _check_state(call)
        _check_pool(call)
        _remember(signature, call.memo)
    if call.inplace_final_state and call.initial_state is not None:
        _check_inplace(call.initial_state)
        refuse_recording({name: getattr(call, name) for name in DIFFERENTIABLE})
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
        _require_tensor(name, values[name])
    if (cu_seqlens := values["cu_seqlens"]) is not None:
        check_cu_seqlens(cu_seqlens, q)
    _check_ranks(q, k, v, g, beta, packed=cu_seqlens is not None)
    _check_inputs(q, k, v, g, beta)
    _check_parameters(values["A_log"], values["dt_bias"], q, v)
    for name in _NUMBERS[op]:
        _check_number(name, values[name])
    for name in _FLAGS[op]:
        _require_bool(name, values[name])


def _shape(x: Tensor) -> str:
    return str(list(x.shape))


def _dtypes(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dict.fromkeys(dtypes))


def _require_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"{name}: expected a dense tensor, got {'a nested one' if x.is_nested else x.layout}")


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        kind = type(value)
        named = f"{kind.__module__}.bool" if kind.__name__ == "bool" else kind.__name__  # numpy has one too
        raise TypeError(f"{name}: expected a bool, got {named}")


def _check_number(name: str, value: object) -> None:
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


def _require_dtype(name: str, x: Tensor, *allowed: torch.dtype) -> None:
    if x.dtype not in allowed:
        raise TypeError(f"{name}: expected dtype {_dtypes(allowed)}, got {_dtypes((x.dtype,))}")


def _require_shape(name: str, x: Tensor, shape: tuple[int, ...], spelled: str) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {spelled} = {list(shape)}, got {_shape(x)}")


def _require_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name}: expected device {q.device} as q, got {x.device}")


def _check_ranks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, packed: bool) -> None:
    if q.dim() not in ((3, 4) if packed else (4,)):
        expected = "[T, H, K] or [1, T, H, K] (cu_seqlens is given)" if packed else "[B, T, H, K]"
        hint = "; a packed [T, H, K] needs cu_seqlens" if q.dim() == 3 else ""
        raise ValueError(f"q: expected {expected}, got rank {q.dim()} with shape {_shape(q)}{hint}")
    if packed and q.dim() == 4 and q.shape[0] != 1:
        raise ValueError(f"q: expected batch size 1 beside cu_seqlens, got shape {_shape(q)}")
    for name, x, rank in (("k", k, q.dim()), ("v", v, q.dim()), ("g", g, q.dim()), ("beta", beta, q.dim() - 1)):
        if x.dim() != rank:
            raise ValueError(f"{name}: expected rank {rank} beside q of rank {q.dim()}, got shape {_shape(x)}")


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    *rows, H, K = q.shape
    HV, V = v.shape[-2:]
    BT = "B, T" if q.dim() == 4 else "T"
    if min(H, K) < 1:
        raise ValueError(f"q: expected H >= 1 and K >= 1, got shape {_shape(q)}")
    _require_shape("k", k, (*rows, H, K), f"[{BT}, H, K] as q")
    _require_shape("v", v, (*rows, HV, V), f"[{BT}, HV, V] beside q")
    if HV < 1 or V < 1 or HV % H:
        raise ValueError(f"v: expected HV a positive multiple of H = {H} and V >= 1, got HV = {HV}, V = {V}")
    _require_shape("g", g, (*rows, HV, K), f"[{BT}, HV, K]")
    _require_shape("beta", beta, (*rows, HV), f"[{BT}, HV]")
    _require_dtype("q", q, *_FLOATS)
    _require_dtype("k", k, q.dtype)
    _require_dtype("v", v, q.dtype)
    _require_dtype("g", g, torch.float32, q.dtype)
    _require_dtype("beta", beta, torch.float32, q.dtype)
    for name, x in (("k", k), ("v", v), ("g", g), ("beta", beta)):
        _require_device(name, x, q)


def _check_parameters(A_log: Tensor | None, dt_bias: Tensor | None, q: Tensor, v: Tensor) -> None:
    HV, K = v.shape[-2], q.shape[-1]
    for name, x, spelled, size in (("A_log", A_log, "HV", HV), ("dt_bias", dt_bias, "HV * K", HV * K)):
        if x is not None:
            _require_tensor(name, x)
            _require_dtype(name, x, torch.float32, state_dtype(q.dtype))
            _require_device(name, x, q)
            if x.numel() != size:
                raise ValueError(f"{name}: expected {spelled} = {size} elements, got {_shape(x)}")


def check_cu_seqlens(cu: Tensor, q: Tensor) -> None:
    _require_tensor("cu_seqlens", cu)
    _require_dtype("cu_seqlens", cu, *_INTS)
    if cu.dim() != 1 or cu.shape[0] < 2:
        raise ValueError(f"cu_seqlens: expected shape [N + 1] with N >= 1, got {_shape(cu)}")
    _require_device("cu_seqlens", cu, q)


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


def _check_state(call: KdaCall) -> None:
    state = call.initial_state
    if state is None:
        if call.inplace_final_state:
            raise ValueError("inplace_final_state: expected an initial_state to write to, got initial_state=None")
        return
    _require_tensor("initial_state", state)
    _require_dtype("initial_state", state, state_dtype(call.q.dtype))
    _require_device("initial_state", state, call.q)
    tail = (call.HV, call.V, call.K) if call.state_v_first else (call.HV, call.K, call.V)
    pooled = call.ssm_state_indices is not None
    first = max(state.shape[0], 1) if pooled and state.dim() else call.N  # a pool has the null slot at least
    spelled = f"[{'slots' if pooled else 'N'}, HV, {'V, K' if call.state_v_first else 'K, V'}]"
    if tuple(state.shape) == (first, tail[0], tail[2], tail[1]) and call.K != call.V:
        raise ValueError(f"initial_state: expected shape {spelled} = {[first, *tail]}, got {_shape(state)}: "
                         f"that is the layout of state_v_first={not call.state_v_first}")  # fmt: skip
    _require_shape("initial_state", state, (first, *tail), spelled)


def _check_pool(call: KdaCall) -> None:
    indices, accepted = call.ssm_state_indices, call.num_accepted_tokens
    if indices is not None:
        _require_tensor("ssm_state_indices", indices)
        _require_dtype("ssm_state_indices", indices, *_INTS)
        _require_device("ssm_state_indices", indices, call.q)
        if call.initial_state is None:
            raise ValueError("ssm_state_indices: expected a pool as initial_state, got initial_state=None")
        if indices.dim() not in (1, 2) or indices.shape[0] != call.N:
            raise ValueError(f"ssm_state_indices: expected [N] or [N, S] with N = {call.N}, got {_shape(indices)}")
        least = 1 if call.cu_seqlens is not None else max(call.T, 1)
        if indices.dim() == 2 and indices.shape[1] < least:
            raise ValueError(f"ssm_state_indices: expected [N, S] with S >= {least}, got {_shape(indices)}")
    if accepted is not None:
        _require_tensor("num_accepted_tokens", accepted)
        _require_dtype("num_accepted_tokens", accepted, *_INTS)
        _require_device("num_accepted_tokens", accepted, call.q)
        if indices is None or indices.dim() != 2:
            raise ValueError("num_accepted_tokens: expected ssm_state_indices of shape [N, S] beside it, got "
                             f"{'None' if indices is None else _shape(indices)}")  # fmt: skip
        _require_shape("num_accepted_tokens", accepted, (call.N,), "[N]")


def _check_inplace(state: Tensor) -> None:
    if state.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError("initial_state: expected a tensor that may be written with inplace_final_state, got one of "
                         "torch.inference_mode(), which only a call inside of it may write")  # fmt: skip
    if state.is_neg():
        raise ValueError("initial_state: expected memory that holds its values with inplace_final_state, got a view "
                         "with the negative bit; resolve_neg() makes one")  # fmt: skip
    reach = 0  # of the axes with smaller strides: the next one must step over it
    for stride, size in sorted(zip(state.stride(), state.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ValueError("initial_state: expected memory of its own for every element with inplace_final_state, "
                             f"got strides {list(state.stride())} for shape {_shape(state)}")  # fmt: skip
        reach += (size - 1) * stride


def refuse_recording(values: dict[str, Any]) -> None:
    """Raise ValueError if autograd would record a call with these arguments that writes to its states."""
    if torch.is_grad_enabled():
        for name in DIFFERENTIABLE:
            if (x := values[name]) is not None and x.requires_grad:
                raise ValueError(f"inplace_final_state: expected torch.no_grad() around it, got {name} that requires "
                                 "grad; the state would be written over in the autograd graph")  # fmt: skip
