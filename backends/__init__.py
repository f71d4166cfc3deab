"""The registry: which backend takes a call, and why another one does not.

A backend is a package `kda.backends.<name>` with the functions of the protocol `Backend`. It is imported on first use,
and it imports its own framework only when it runs.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from typing import Protocol

from torch import Tensor

from kda.backends.call import KdaCall

NAMES = ("tilelang", "pypto", "torch")
_FOR_DEVICE = {"cuda": "tilelang", "npu": "pypto"}
_warned: set[str] = set()


class Backend(Protocol):
    """What a backend package offers."""

    about: str
    """One line for `python -m kda info`: what computes, what supplies gradients, what is proved where."""

    differentiable: bool
    """Whether autograd goes through its `chunk_kda`; where it does not, torch's formulas supply the gradient."""

    def unusable(self) -> list[str]:
        """Every reason why this machine cannot run the backend; empty if it can."""
        ...

    def refuses(self, call: KdaCall) -> list[str]:
        """Every reason why the backend cannot take this call; empty if it can."""
        ...

    def chunk_kda(self, call: KdaCall) -> tuple[Tensor, Tensor | None]:
        """Run the call; `o` in v's layout (4-D) and dtype, the final state fp32 (fp64 for fp64 inputs)."""
        ...

    def fused_recurrent_kda(self, call: KdaCall) -> tuple[Tensor, Tensor | None]:
        """As `chunk_kda`, token by token, with state pools."""
        ...

    def stages(self, call: KdaCall) -> dict[str, Tensor]:
        """The tensors of M1 to M4 that the backend can hand out, named and laid out as `golden.chunk_kda_stages`."""
        ...


@functools.cache
def load(name: str) -> Backend:
    """Import backend `name`. Raises ValueError for a name that is not in `NAMES`."""
    if name not in NAMES:
        raise ValueError(f"backend: expected one of {', '.join(NAMES)}, got {name!r}")
    return importlib.import_module(f"{__name__}.{name}")  # type: ignore[return-value]


def unusable(name: str) -> list[str]:
    """Every reason why backend `name` cannot run on this machine; empty if it can."""
    return load(name).unusable()


def status() -> dict[str, list[str]]:
    """Each backend's name with the reasons why it cannot be used here; an empty list means that it can."""
    return {name: unusable(name) for name in NAMES}


def for_device(device_type: str) -> str:
    """The backend that `auto` tries first for tensors on this type of device."""
    return _FOR_DEVICE.get(device_type, "torch")


def select(call: KdaCall, backend: str | None = None) -> Backend:
    """The backend for `call`: `backend`, else the environment's KDA_BACKEND, else `auto`.

    `auto` takes the backend of the tensors' device and falls back to torch with one warning per reason. A backend
    named explicitly never falls back: NotImplementedError lists every reason why it cannot take the call.
    Raises ValueError for an unknown name, with the known ones, and TypeError for what is no name.
    """
    source, name = "backend", backend
    if name is None:
        source, name = "KDA_BACKEND", os.environ.get("KDA_BACKEND") or "auto"
    if not isinstance(name, str):
        raise TypeError(f"backend: expected a str or None, got {type(name).__name__}")
    if name not in ("auto", *NAMES):
        raise ValueError(f"{source}: expected one of auto, {', '.join(NAMES)}, got {name!r}")
    if (chosen := call.memo.get(("backend", name))) is None:
        chosen = load(_auto(call) if name == "auto" else _willing(name, call))
        if call.q.device.type != "cpu":  # where KDA_EMULATE decides, and may change from call to call
            call.memo["backend", name] = chosen
    return chosen


def _auto(call: KdaCall) -> str:
    name = for_device(call.q.device.type)
    reasons = _reasons(name, call)
    for reason in reasons:
        _warn_once(f"kda: {name} cannot take this {call.op} call ({reason}); using torch instead")
    return _willing("torch", call) if reasons else name


def _willing(name: str, call: KdaCall) -> str:
    if reasons := _reasons(name, call):
        raise NotImplementedError(f"backend {name!r} cannot take this {call.op} call: {'; '.join(reasons)}")
    return name


def _reasons(name: str, call: KdaCall) -> list[str]:
    return unusable(name) or load(name).refuses(call)


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=5)
