"""Cases of chunk_kda's gradients: gates, tails, packing, layouts, states, loss scales, near-identical keys, one set of
bits. Each is held to the fp64 golden's backward pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from kda import golden
from kda.backends.call import PER_TOKEN
from kda.checks import checked
from kda.gates.case import GRADIENTS, Inputs, Run, case, first_departing_stage

LIMIT, GATE_LIMIT = 8e-3, 1e-2
"""Relative RMSE of the gradients, the latter of those of g, A_log and dt_bias. bf16 keeps 8 bits, so that rounding a
result to it costs 1.7e-3 by itself; a kernel's operands are rounded too. fp16 keeps 11, but has the same limits."""
ROUNDED_INPUTS = 2
"""By this all limits grow for TileLang on a GPU where q, k and v are fp16: it rounds them to bf16 first, since with a
loss scale dh and db may exceed what fp16 can hold. That alone moves the gradients here by up to 8e-3 (A_log), and where
keys are near-identical by up to 2.6e-2 (beta)."""
FP32_LIMIT = 1e-5
"""The same of all gradients where q, k and v are fp32: ten times what sums over a sequence were seen to lose."""
ALIKE_LIMIT = 3e-2
"""The same of all gradients for TileLang on a GPU where keys are near-identical and hardly decay: its products there
have bf16 operands, and rounding Ainv and w to bf16 costs 1.5e-2 in the gradient of beta."""
SCALES = {torch.float16: (1.0, 2.0**10)}
"""Loss scales; 2^10 is about the largest with which the gradients here, of 1 and more, stay below fp16's 65504."""
ANY_SCALE = (2.0**-10, 1.0, 2.0**20)

Gradients = dict[str, Tensor]


def accuracy(run: Run, inputs: Inputs, label: str = "", *, limit: float = 0.0, scales: tuple[float, ...] = (1.0,),
             padding: Tensor | None = None) -> None:  # fmt: skip
    """Hold the gradients of every tensor to the golden's, with gradients of o and of the final state of N(0, scale).

    `limit` widens the limits of all gradients. The gradient of o is NaN on `padding`, a mask of tokens. Where a
    gradient departs, the first stage is named.
    """
    do, d_state = outer_gradients(run, inputs)
    expected = reference(inputs, do, d_state)
    widened = ROUNDED_INPUTS if _by_tilelang_on_a_gpu(run) and run.dtype == torch.float16 else 1
    for scale in scales:  # powers of two, which only move the reference's exponents
        given = (do * scale).masked_fill(padding, math.nan) if padding is not None else do * scale
        found = run.gradients(inputs, given, None if d_state is None else d_state * scale)
        prefix = label if len(scales) == 1 else f"{label} scale {scale:g}".strip()
        off = []
        for name in GRADIENTS:
            if name in expected:
                allowed = max(limit, allowed_error(run.dtype, name)) * widened
                actual, wanted = _felt(found[name]), _felt(expected[name] * scale)
                if not run.close(f"{prefix} d{name}".strip(), actual, wanted, math.inf, allowed):
                    off.append(name)
        if off:
            stage = first_departing_stage(run.backend, inputs, off)
            run.holds(f"{prefix} stage".strip(), False, f"first stage that departs: {stage}")


def allowed_error(dtype: torch.dtype, name: str) -> float:
    """The limit of one gradient's relative RMSE where q, k and v have this dtype."""
    if dtype == torch.float32:
        return FP32_LIMIT
    return GATE_LIMIT if name in ("g", "A_log", "dt_bias") else LIMIT


def outer_gradients(run: Run, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Of o, in its dtype, and of the final state if the call returns it: N(0, 1), the same on every device."""
    generator = torch.Generator("cpu").manual_seed(1)
    call = checked("chunk_kda", **inputs)
    do = torch.randn(inputs["v"].shape, generator=generator, dtype=torch.float32, device="cpu").to(run.dtype)
    if not inputs["output_final_state"]:
        return do.to(run.device), None
    d_state = torch.randn(call.N, *call.state_shape, generator=generator, dtype=torch.float32, device="cpu")
    return do.to(run.device), d_state.to(run.device)


def reference(inputs: Inputs, do: Tensor, d_state: Tensor | None) -> Gradients:
    """The golden's, in fp64; nothing where tensors have no values (`kda.gates.dry`)."""
    if isinstance(inputs["q"], FakeTensor):
        return {}
    return golden.chunk_kda_backward_golden(do, d_state, **inputs)


def _by_tilelang_on_a_gpu(run: Run) -> bool:
    """There its products have 16-bit operands."""
    return (run.backend, run.device.type) == ("tilelang", "cuda")


def _felt(x: Tensor) -> Tensor:
    """x, with 0 for what fp32 has no normal number for: a gradient through gates of -inf is 1e-45 in the golden."""
    return x.masked_fill(x.abs() < torch.finfo(torch.float32).tiny, 0.0)


@case("GRAD-DECAYS", "gradients at every log decay: ordinary, 0, -1.5, -5, -inf, mixed")
def decays(run: Run) -> None:
    for gate in ("logsigmoid", 0.0, -1.5, -5.0, -math.inf, "half_1000", "mixed"):
        accuracy(run, run.stable(1, run.cut(100, 70), 2, gate=gate, initial_state=True), f"{gate}")


@case("GRAD-RAW", "gradients through the norm, both gates and the sigmoid")
def raw(run: Run) -> None:
    T = run.cut(130, 70)
    accuracy(run, run.raw(1, T, 2, lower_bound=-5.0, initial_state=True), "lower bound")
    accuracy(run, run.raw(1, T, 2, initial_state=True), "softplus")


@case("GRAD-TAILS", "gradients at T 1, 17, 63, 64, 65, 130")
def tails(run: Run) -> None:
    for T in (1, 17, 63, 64, 65, 130):
        accuracy(run, run.stable(1, T, 2, initial_state=True), f"T {T}")


@case("GRAD-PACKED", "gradients of packed and empty sequences, NaN on the padding")
def packed(run: Run) -> None:
    lengths, around = [0, 37, 64, 0, 1, 70, 0], 6
    T = sum(lengths) + 2 * around
    calls = {
        "stable": run.stable(1, T, 2, gate="mixed", lengths=lengths, initial_state=True),
        "lower bound": run.raw(1, T, 1, HV=2, lengths=lengths, lower_bound=-5.0, initial_state=True),
    }
    padding = torch.ones(1, T, 1, 1, dtype=torch.bool, device=run.device)
    padding[:, around:-around] = False
    for label, inputs in calls.items():
        inputs["cu_seqlens"] = inputs["cu_seqlens"] + around
        for name in PER_TOKEN:
            inputs[name] = inputs[name].masked_fill(padding.view(1, T, *[1] * (inputs[name].dim() - 2)), math.nan)
        accuracy(run, inputs, label, padding=padding)


@case("GRAD-GVA", "gradients with more value heads than heads: HV 2·H")
def gva(run: Run) -> None:
    accuracy(run, run.stable(2, 70, 2, HV=4, initial_state=True))


@case("GRAD-LAYOUT", "gradients with K != V, and with states K first")
def layout(run: Run) -> None:
    accuracy(run, run.stable(1, 70, 1, 64, V=128, initial_state=True, state_v_first=False))


@case("GRAD-STATES", "gradients without any state, as in training")
def states(run: Run) -> None:
    accuracy(run, {**run.raw(1, 70, 2, lower_bound=-5.0), "output_final_state": False})


@case("GRAD-SCALE", "gradients at loss scales from 2^-10 to 2^20")
def scale(run: Run) -> None:
    accuracy(run, run.stable(1, 100, 2, initial_state=True), scales=SCALES.get(run.dtype, ANY_SCALE))


@case("GRAD-ALIKE", "gradients with near-identical keys, beta near 1, hardly any decay")
def alike(run: Run) -> None:
    T = run.cut(200, 70)
    inputs = golden.inputs.collinear(1, T, 2, initial_state=True, dtype=run.dtype, device=run.device)
    accuracy(run, inputs, limit=ALIKE_LIMIT if _by_tilelang_on_a_gpu(run) else 0.0)


@case("GRAD-BITS", "30 backward passes give the same bits (3 on a CPU)")
def bits(run: Run) -> None:
    inputs = run.stable(1, 200, 2, initial_state=True)
    do, d_state = outer_gradients(run, inputs)
    first = run.gradients(inputs, do, d_state)
    differ = dict.fromkeys(first, 0)
    repeated = 2 if run.device.type == "cpu" else 29
    for _ in range(repeated):
        for name, gradient in run.gradients(inputs, do, d_state).items():
            differ[name] += not torch.equal(gradient, first[name])
    for name, count in differ.items():
        run.holds(f"d{name}", count == 0, f"{count} of {repeated} passes gave other bits than the first (or a NaN)")
