"""Backends that a test bends as it likes, for the fixture `register`."""

from __future__ import annotations

import torch
from torch import Tensor

from kda import backends
from kda.backends.call import ARGUMENTS, KdaCall

Result = tuple[Tensor, Tensor | None]


class FakeBackend:
    """It takes every call, notes it and returns v; or it says why it cannot, as `missing` and `refusals` tell it to."""

    about = "made for a test"
    differentiable = True
    takes = frozenset(argument.name for argument in ARGUMENTS["fused_recurrent_kda"] if argument.optional)

    def __init__(self) -> None:
        self.calls: list[KdaCall] = []
        self.missing: list[str] = []
        self.refusals: list[str] = []

    def unusable(self) -> list[str]:
        return list(self.missing)

    def refuses(self, call: KdaCall) -> list[str]:
        return list(self.refusals)

    def run(self, call: KdaCall) -> Result:
        return call.v.clone(), None

    def chunk_kda(self, call: KdaCall) -> Result:
        self.calls.append(call)
        return self.run(call)

    fused_recurrent_kda = chunk_kda

    def stages(self, call: KdaCall) -> dict[str, Tensor]:
        return {}


class WithoutBackward(FakeBackend):
    """The torch backend, but cut off from autograd, as a kernel is."""

    differentiable = False

    def run(self, call: KdaCall) -> Result:
        assert not torch.is_grad_enabled() or not call.q.requires_grad
        with torch.no_grad():
            return getattr(backends.load("torch"), call.op)(call)
