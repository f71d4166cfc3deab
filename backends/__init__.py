"""The registry: which backend takes a call, and why another one does not.

A backend is a package `kda.backends.<name>` with the functions of the protocol `Backend`, or anything else with them
that `register` has been given. It is imported on first use, and it imports its own framework only when it runs.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Set
from typing import Protocol, cast

# Not `import torch`: in this package that name is the backend's.
from torch import Tensor, contiguous_format
from torch.autograd.graph import increment_version

from kda.backends import environment
from kda.backends.call import ARGUMENTS, KdaCall
from kda.backends.pool import checkpoints_without_tokens, start_states

_PACKAGES = ("tilelang", "pypto", "torch")
_FOR_DEVICE = {"cuda": "tilelang", "npu": "pypto"}
_registered: dict[str, Backend] = {}
_registered_for: dict[str, str] = {}  # type of device -> name
_changed = 0  # how often: choices made before a change count no more
_warned: set[str] = set()


class Backend(Protocol):
    """What a backend offers. It is never called without tokens.

    One that is not differentiable may have a backward pass for an operator <op>: `<op>_backward(call, wanted, d_o,
    d_states, *kept)` returns the gradients of the call's tensors that are wanted, by name. And beside it
    `<op>_keeping(call)`, which returns what the operator returns and a tuple of tensors: under KDA_KEEP_TABLE autograd
    saves them, and they are `kept`.
    """

    @property
    def about(self) -> str:
        """One line for `python -m kda info`: what computes, what supplies gradients, what is proved where."""
        ...

    @property
    def differentiable(self) -> bool:
        """Whether autograd goes through its operators; else a backward pass of its own or torch's formulas stand in."""
        ...

    @property
    def takes(self) -> Set[str]:
        """The optional arguments that it heeds, `scale` at least, which every call has. Others are refused by name."""
        ...

    def unusable(self) -> list[str]:
        """Every reason why this machine cannot run the backend; empty if it can."""
        ...

    def refuses(self, call: KdaCall) -> list[str]:
        """Every other reason why the backend cannot take this call; empty if it can."""
        ...

    def chunk_kda(self, call: KdaCall) -> tuple[Tensor, Tensor | None]:
        """Run the call; `o` in v's layout (4-D) and dtype, the final state in `call.final_dtype`."""
        ...

    def fused_recurrent_kda(self, call: KdaCall) -> tuple[Tensor, Tensor | None]:
        """As `chunk_kda`, token by token, with state pools."""
        ...

    def stages(self, call: KdaCall) -> dict[str, Tensor]:
        """The tensors of M1 to M4 that the backend can hand out, named and laid out as `golden.chunk_kda_stages`."""
        ...


def register(name: str, backend: Backend, *, device_type: str | None = None) -> None:
    """Add a backend under a name of its own, or put it in the place of one of the package.

    With `device_type` ("cuda", "cpu", ...), `auto` takes it for tensors on such devices.
    """
    global _changed
    _changed += 1
    _registered[name] = backend
    if device_type is not None:
        _registered_for[device_type] = name


def unregister(name: str) -> None:
    """Take a backend away again that `register` has added. Raises KeyError if it has not."""
    global _changed
    _changed += 1
    del _registered[name]
    for device_type in [device_type for device_type, taken_by in _registered_for.items() if taken_by == name]:
        del _registered_for[device_type]


def names() -> tuple[str, ...]:
    """The names of all backends, those of the package first."""
    return tuple(dict.fromkeys((*_PACKAGES, *_registered)))


def load(name: str) -> Backend:
    """Backend `name`, imported if it is of the package. Raises ValueError for a name that is not in `names()`."""
    return _registered.get(name) or _package(name)


@functools.cache
def _package(name: str) -> Backend:
    if name not in _PACKAGES:
        raise ValueError(f"backend: expected one of {', '.join(names())}, got {name!r}")
    return cast(Backend, importlib.import_module(f"{__name__}.{name}"))


def unusable(name: str) -> list[str]:
    """Every reason why backend `name` cannot run on this machine; empty if it can."""
    return load(name).unusable()


def status() -> dict[str, list[str]]:
    """Each backend's name with the reasons why it cannot be used here; an empty list means that it can."""
    return {name: unusable(name) for name in names()}


def for_device(device_type: str) -> str:
    """The backend that `auto` tries first for tensors on this type of device."""
    return _registered_for.get(device_type) or _FOR_DEVICE.get(device_type, "torch")


def select(call: KdaCall, backend: str | None = None) -> str:
    """The name of the backend for `call`: `backend`, else the environment's KDA_BACKEND, else `auto`.

    `auto` takes the backend of the tensors' device and falls back to torch with one warning per reason. A backend
    named explicitly never falls back: NotImplementedError lists every reason why it cannot take the call.
    Raises ValueError for an unknown name, with the known ones, and TypeError for what is no name.
    """
    source, name = "backend", backend
    if name is None:
        source, name = "KDA_BACKEND", environment.backend_name()
    if not isinstance(name, str):
        raise TypeError(f"backend: expected a str or None, got {type(name).__name__}")
    if (chosen := call.memo.get(("backend", name, _changed))) is None:
        if name not in ("auto", *names()):
            raise ValueError(f"{source}: expected one of auto, {', '.join(names())}, got {name!r}")
        chosen = _auto(call) if name == "auto" else _willing(name, call)
        if call.q.device.type != "cpu":  # where KDA_EMULATE decides, and may change from call to call
            call.memo["backend", name, _changed] = chosen
    return chosen


def run(name: str, call: KdaCall) -> tuple[Tensor, Tensor | None]:
    """o `[B, T, HV, V]` and the states of a call that backend `name` takes."""
    if call.B * call.T == 0:
        o = call.v.new_zeros(call.v.shape) if call.out is None else call.out.zero_()
        checkpoints_without_tokens(call)
        return o, _states_without_tokens(call)
    backend = load(name)
    o, states = getattr(backend, call.op)(call)
    if call.out is not None and o is not call.out:
        o = call.out.copy_(o)
    if call.inplace_final_state and call.initial_state is not None and not backend.differentiable:
        increment_version(call.initial_state)  # autograd cannot see a kernel write
    return o, states


def _auto(call: KdaCall) -> str:
    name = for_device(call.q.device.type)
    reasons = refusals(name, call)
    for reason in reasons:
        _warn_once(f"kda: {name} cannot take this {call.op} call ({reason}); using torch instead")
    return _willing("torch", call) if reasons else name


def _willing(name: str, call: KdaCall) -> str:
    if reasons := refusals(name, call):
        raise NotImplementedError(f"backend {name!r} cannot take this {call.op} call: {'; '.join(reasons)}")
    return name


def refusals(name: str, call: KdaCall) -> list[str]:
    """Every reason why backend `name` cannot take the call here; empty if it can."""
    backend = load(name)
    if unusable := backend.unusable():
        return unusable
    options = [
        a for a in ARGUMENTS[call.op] if a.optional and getattr(call, a.name) is not a.default and a.name != "out"
    ]  # `run` writes to out where the backend doesn't
    ignored = [a.name for a in options if a.name not in backend.takes]
    return [f"it does not take {', '.join(ignored)}"] * bool(ignored) + backend.refuses(call)


def _states_without_tokens(call: KdaCall) -> Tensor | None:
    """What a call returns whose sequences are all empty for lack of tokens: the states that they start from."""
    if not call.output_final_state:
        return None
    if call.inplace_final_state:
        return call.initial_state
    if call.state_per_token:
        return call.q.new_empty(0, *call.state_shape, dtype=call.final_dtype)
    return start_states(call).to(call.final_dtype, copy=True, memory_format=contiguous_format)


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=6)
