"""What a gate case is, and the run that a case drives: calls, references, limits and findings."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import kda
from kda import backends, golden
from kda.backends.call import DIFFERENTIABLE, PER_TOKEN, KdaCall
from kda.checks import checked
from kda.cli.memory import free_memory
from kda.golden.compare import Comparison, compare
from kda.golden.constants import CHUNK_SIZE

O_LIMIT = 1e-2
"""|error| of every element of o: at most O_LIMIT + O_LIMIT · |reference|."""
STATE_LIMIT = 1e-3
"""The same for the final state, on stable inputs."""
REL_RMSE_LIMIT = 5e-3
"""Root of the mean square error over that of the reference: o, the final state, and each stage."""
COLLINEAR_LIMIT = 1e-2
"""The same where keys are near-identical and hardly decay: I + Akk is ill-conditioned there."""
COLLINEAR_BF16_LIMIT = 3e-2
"""That limit, and no other, for TileLang on a GPU in bf16: rounding kg, u or Akk's operands to it costs 1e-2 in the
state each, since what the next keys cannot see of an error is never corrected."""

GRADIENTS: dict[str, str] = {"initial_state": "dM4 (d_initial_state)"} | {
    name[1:]: f"{stage} ({name})"
    for stage, names in golden.BACKWARD_STAGES.items()
    for name in names
    if name[1:] in DIFFERENTIABLE
}
"""Each tensor that has a gradient -> the stage of the backward pass that makes it, in the order of the stages."""

Inputs = dict[str, Any]


class Skip(Exception):
    """Raised by a case that this machine cannot run; the message says what is missing."""


@dataclass(frozen=True)
class Case:
    """A row of the table: `check` drives a `Run` and leaves its findings there."""

    id: str
    title: str
    check: Callable[[Run], None]
    slow: bool


@dataclass
class Finding:
    """One thing that a case looked at."""

    what: str
    ok: bool
    text: str
    comparison: Comparison | None = None
    error: Tensor | None = None  # of o, [tokens, V]: the largest over heads, in units of each element's limit
    borders: list[int] = field(default_factory=list)  # tokens at which a chunk begins


@dataclass
class Result:
    """A case with its outcome: "passed", "failed", "skipped" (this machine) or "refused" (the backend says why)."""

    case: Case
    outcome: str = "passed"
    reason: str = ""
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0


CASES: dict[str, Case] = {}


def case(id: str, title: str, *, slow: bool = False) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Enter the decorated function into the table; slow cases run only when asked for."""

    def enter(check: Callable[[Run], None]) -> Callable[[Run], None]:
        assert id not in CASES, id
        CASES[id] = Case(id, title, check, slow)
        return check

    return enter


class Run:
    """A case under way on one backend, device and dtype."""

    def __init__(self, backend: str, device: torch.device, dtype: torch.dtype) -> None:
        self.backend, self.device, self.dtype = backend, device, dtype
        self.findings: list[Finding] = []
        self.interpreted = backend == "pypto" and self.device.type == "cpu"
        self.was_cut = False

    # ---- inputs and calls

    def cut(self, full: int, small: int) -> int:
        """A size or count: `full`, or `small` where PyPTO's interpreter executes a kernel op by op and keeps it all."""
        self.was_cut |= self.interpreted
        return small if self.interpreted else full

    def stable(self, B: int, T: int, H: int, K: int = 128, **options: Any) -> Inputs:
        """`golden.inputs.stable` on this run's device and dtype."""
        return golden.inputs.stable(B, T, H, K, dtype=self.dtype, device=self.device, **options)

    def raw(self, B: int, T: int, H: int, K: int = 128, **options: Any) -> Inputs:
        """`golden.inputs.raw`: norm, gate and sigmoid are left to the kernel."""
        return golden.inputs.raw(B, T, H, K, dtype=self.dtype, device=self.device, **options)

    def chunk_kda(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        """The backend's output and final state."""
        return _both(kda.chunk_kda(**{**inputs, "output_final_state": True}, backend=self.backend))

    def fused_recurrent_kda(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        """The backend's output and final state or states, token by token."""
        return _both(kda.fused_recurrent_kda(**{**inputs, "output_final_state": True}, backend=self.backend))

    def gradients(self, inputs: Inputs, do: Tensor, d_final_state: Tensor | None) -> dict[str, Tensor]:
        """The backend's gradients of every tensor that has one, from those of o and of the final state (None: no state
        is asked for)."""
        leaves = differentiable(inputs)
        results = kda.chunk_kda(**{**inputs, **leaves}, backend=self.backend)
        pairs = [(y, d) for y, d in zip(results, (do, d_final_state), strict=True) if y is not None and d is not None]
        ys, ds = zip(*pairs, strict=True)
        return dict(zip(leaves, torch.autograd.grad(ys, tuple(leaves.values()), ds), strict=True))

    def needs_memory(self, gigabytes: int) -> None:
        """Skip the case where the device has less free memory than this."""
        free = free_memory(self.device)
        if free is not None and free < gigabytes << 30:
            raise Skip(f"needs {gigabytes} GiB of free memory on {self.device.type}, has {free >> 30}")

    # ---- findings

    def accuracy(self, inputs: Inputs, label: str = "", *, stable: bool = True, limit: float = REL_RMSE_LIMIT) -> None:
        """Hold `chunk_kda(**inputs)` to the reference; on a departure, name the first stage that departs."""
        o, state = self.chunk_kda(**inputs)
        expected_o, expected_state = reference(inputs)
        good = self.close(f"{label} o".strip(), o, expected_o, O_LIMIT, limit, borders=chunk_borders(inputs))
        state_limit = STATE_LIMIT if stable else float("inf")
        good &= self.close(f"{label} state".strip(), state, expected_state, state_limit, limit)
        if not good and (stage := first_departing_stage(self.backend, inputs)):
            self.findings.append(Finding(f"{label} stage".strip(), False, f"first stage that departs: {stage}"))

    def close(self, what: str, actual: Tensor, expected: Tensor, atol: float, limit: float = REL_RMSE_LIMIT,
              *, borders: list[int] | None = None) -> bool:  # fmt: skip
        """|actual - expected| <= atol + atol · |expected| everywhere (atol may be inf), and relative RMSE <= limit.

        With `borders`, the tensors are outputs `[..., T, HV, V]` and the plot shows them.
        """
        rtol = atol if atol < float("inf") else 0.0
        # Finite, so that the error of a NaN or inf is out of tolerance nevertheless.
        found = compare(actual, expected, atol=min(atol, sys.float_info.max), rtol=rtol, max_rel_rmse=limit)
        error = None if borders is None else _over_heads(actual, expected, atol)
        self.findings.append(Finding(what, found.ok, str(found), found, error, borders or []))
        return found.ok

    def same_bits(self, what: str, actual: Tensor, expected: Tensor) -> None:
        """The two tensors are equal bit for bit (a NaN equals itself)."""
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            text = f"{list(actual.shape)} {actual.dtype} against {list(expected.shape)} {expected.dtype}"
            self.findings.append(Finding(what, False, text))
            return
        a, b = actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
        differ = (a != b).nonzero()
        text = "same bits" if not len(differ) else f"{len(differ)} bytes differ, the first at {differ[0].tolist()}"
        self.findings.append(Finding(what, not len(differ), text))

    def holds(self, what: str, ok: bool, text: str) -> None:
        """Any other property; `text` says what was seen."""
        self.findings.append(Finding(what, bool(ok), text))


def _over_heads(actual: Tensor, expected: Tensor, atol: float) -> Tensor:
    """The largest |error| / (atol + atol · |expected|) over heads, [tokens, V]; runs of tokens, not tensors whole."""
    pairs = zip(actual.flatten(0, -3).split(4_096), expected.flatten(0, -3).split(4_096), strict=True)
    shares = [((a.float() - e.float()).abs() / (atol + atol * e.float().abs())).amax(1).cpu() for a, e in pairs]
    return torch.cat(shares)


def chunk_borders(inputs: Inputs) -> list[int]:
    """The tokens of the flat batch at which a chunk of CHUNK_SIZE begins."""
    if "cu_seqlens" in inputs:
        bounds = inputs["cu_seqlens"].tolist()
    else:
        B, T = inputs["q"].shape[:2]
        bounds = [T * b for b in range(B + 1)]
    return [t for start, end in itertools.pairwise(bounds) for t in range(start, end, CHUNK_SIZE)]


def reference(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The fp64 token recurrence where that is quick, else the golden: fp64, or fp32 for the largest."""
    B, T = inputs["beta"].shape[:2] if inputs["beta"].dim() == 3 else (1, inputs["beta"].shape[0])
    rows = inputs["beta"].numel()  # tokens x value heads
    if rows <= 20_000 and B * T <= 4_096:
        return recurrence(**inputs)
    return chunked(torch.float64 if rows <= 100_000 else torch.float32, **inputs)


def chunked(dtype: torch.dtype, **inputs: Any) -> tuple[Tensor, Tensor]:
    """The golden's chunked form in `dtype`, with its final state."""
    if isinstance(inputs["q"], FakeTensor):
        return unknown_results(checked("chunk_kda", **{name: x for name, x in inputs.items() if name != "chunk_size"}))
    return _both(golden.chunk_kda_golden(**{**inputs, "output_final_state": True}, dtype=dtype))


def recurrence(**inputs: Any) -> tuple[Tensor, Tensor]:
    """The fp64 token recurrence with its final state."""
    if isinstance(inputs["q"], FakeTensor):
        return unknown_results(checked("chunk_kda", **inputs))
    return _both(golden.recurrent_kda_golden(**{**inputs, "output_final_state": True}))


def unknown_results(call: KdaCall) -> tuple[Tensor, Tensor]:
    """What a call returns where tensors have no values (`kda.gates.dry`): o and the state, by their shapes alone."""
    o = torch.empty_like(call.v)
    if call.inplace_final_state and call.initial_state is not None:
        return o, call.initial_state
    return o, torch.empty(call.N, *call.state_shape, dtype=call.final_dtype, device=o.device)


def _both(result: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
    """o and the state of a call that asks for it."""
    o, state = result
    assert state is not None
    return o, state


@contextlib.contextmanager
def cut_into_segments(setting: str) -> Iterator[None]:
    """Inside, KDA_SPLIT is this; backends that don't cut sequences take no notice."""
    before = os.environ.get("KDA_SPLIT")
    os.environ["KDA_SPLIT"] = setting
    try:
        yield
    finally:
        if before is None:
            del os.environ["KDA_SPLIT"]
        else:
            os.environ["KDA_SPLIT"] = before


def tokens(inputs: Inputs, start: int, stop: int) -> Inputs:
    """The same call on the tokens [start, stop) alone."""
    return {name: x[:, start:stop] if name in PER_TOKEN else x for name, x in inputs.items()}


def differentiable(inputs: Inputs) -> Inputs:
    """The call's tensors that may have a gradient, as leaves that require one."""
    given = {name: inputs[name] for name in DIFFERENTIABLE if inputs.get(name) is not None}
    return {name: x.detach().requires_grad_() for name, x in given.items()}


def first_departing_stage(backend: str, inputs: Inputs, gradients_off: Sequence[str] = ()) -> str | None:
    """The first of M1 to M4 where the backend's own tensors leave the golden's; None where all that it has agree.

    After them, the first of dM4 to dM1 that makes one of the gradients that are off. A backend hands out no tensors
    between these, so the fault may be in an earlier stage whose tensors the other gradients do not show.
    """
    call = checked("chunk_kda", **inputs)
    if actual := backends.load(backend).stages(call):
        expected = golden.chunk_kda_stages(**inputs, chunk_size=actual["Aqk"].shape[-1])
        if stage := golden.first_departure(actual, expected, REL_RMSE_LIMIT):
            return stage
    return next((stage for name, stage in GRADIENTS.items() if name in gradients_off), None)


def run_case(case: Case, backend: str, device: torch.device, dtype: torch.dtype) -> Result:
    """Run one case; an exception is a failure with its message, a refusal by the backend is told apart."""
    run, result, start = Run(backend, device, dtype), Result(case), time.perf_counter()
    try:
        case.check(run)
        result.outcome = "passed" if run.findings and all(f.ok for f in run.findings) else "failed"
    except Skip as skip:
        result.outcome, result.reason = "skipped", str(skip)
    except NotImplementedError as refusal:
        result.outcome, result.reason = "refused", str(refusal)
    except Exception as error:
        result.outcome, result.reason = "failed", f"{type(error).__name__}: {error}"
    if run.was_cut and not result.reason:
        result.reason = "with fewer or smaller inputs than its title says, for PyPTO's interpreter"
    result.findings, result.seconds = run.findings, time.perf_counter() - start
    return result
