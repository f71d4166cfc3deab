"""Gate cases without numbers: which calls they are going to make, so that a backend can build their kernels ahead."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kda import backends
from kda.backends.call import KdaCall, Op
from kda.checks import checked
from kda.gates.case import REL_RMSE_LIMIT, Case, Inputs, Run, differentiable, unknown_results


def calls_of(cases: Sequence[Case], backend: str, device: torch.device, dtype: torch.dtype) -> list[KdaCall]:
    """The calls that the cases make of the backend, but those that depend on the values of an earlier result.

    Their tensors are fake ones: they have shapes, dtypes, strides and a device, and no memory.
    """
    calls: list[KdaCall] = []
    with warnings.catch_warnings(), FakeTensorMode():
        warnings.simplefilter("ignore")  # whatever it is, the case itself will say it
        for case in cases:
            with contextlib.suppress(Exception):  # it wants to know a value, or cannot run here at all
                case.check(DryRun(backend, device, dtype, calls))
    return calls


class DryRun(Run):
    """A run that notes the calls, answers them with tensors of the right shape, and finds nothing."""

    def __init__(self, backend: str, device: torch.device, dtype: torch.dtype, calls: list[KdaCall]) -> None:
        super().__init__(backend, device, dtype)
        self.calls = calls

    def chunk_kda(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        return self._noted("chunk_kda", {**inputs, "output_final_state": True})

    def fused_recurrent_kda(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        return self._noted("fused_recurrent_kda", {**inputs, "output_final_state": True})

    def gradients(self, inputs: Inputs, do: Tensor, d_final_state: Tensor | None) -> dict[str, Tensor]:
        leaves = differentiable(inputs)  # by which the backend sees that kernels of the backward pass are wanted
        self._noted("chunk_kda", {**inputs, **leaves})
        return leaves

    def _noted(self, op: Op, inputs: Inputs) -> tuple[Tensor, Tensor]:
        call = checked(op, **inputs)
        call.memo = {}  # not the one of the real call: what is derived from fake tensors must not get there
        backends.select(call, self.backend)  # raises as the case will, if the backend refuses the call
        if call.B * call.T:  # others are answered without a backend
            self.calls.append(call)
        return unknown_results(call)

    def accuracy(self, inputs: Inputs, label: str = "", *, stable: bool = True, limit: float = REL_RMSE_LIMIT) -> None:
        self.chunk_kda(**inputs)

    def close(self, what: str, actual: Tensor, expected: Tensor, atol: float, limit: float = REL_RMSE_LIMIT,
              *, borders: list[int] | None = None) -> bool:  # fmt: skip
        return True

    def same_bits(self, what: str, actual: Tensor, expected: Tensor) -> None:
        pass

    def holds(self, what: str, ok: bool, text: str) -> None:
        pass
