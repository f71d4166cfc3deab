"""Cases by value: decays that break pivots and clamps, near-singular keys, cancellation, and every flag."""

from __future__ import annotations

from functools import partial

import torch

from kda import golden
from kda.gates.case import COLLINEAR_BF16_LIMIT, COLLINEAR_LIMIT, Inputs, Run, case, cut_into_segments, recurrence

DECAYS: dict[str, tuple[str, float | str]] = {
    "G-1.5": ("log decay -1.5 throughout", -1.5),
    "G-2": ("log decay -2 throughout", -2.0),
    "G-5": ("log decay -5 throughout", -5.0),
    "G-1000": ("log decay -1000 on half the tokens", "half_1000"),
    "G0": ("no decay", 0.0),
    "G-INF": ("log decay -inf throughout", float("-inf")),
    "GMIX": ("log decays 0, -1000, -inf and ordinary mixed", "mixed"),
}


def _decay(run: Run, gate: float | str) -> None:
    # Without decay a state grows past what the element-wise limit of stable inputs is meant for.
    calm = gate != 0.0
    run.accuracy(run.stable(1, 300, 2, gate=gate, initial_state=True), "fixed length", stable=calm)
    run.accuracy(run.stable(1, 200, 2, gate=gate, lengths=[63, 0, 137], initial_state=True), "packed", stable=calm)


for _id, (_title, _gate) in DECAYS.items():
    case(_id, _title)(partial(_decay, gate=_gate))


@case("ALIKE", "keys that share a direction, one beta for all tokens, hardly any decay")
def alike(run: Run) -> None:
    for cosine, beta, T in (
        (0.9, 0.9, 256),
        (0.99, 0.95, 300),
        (0.999, 0.99, 256),
        (0.999, 0.9, 64),
        (0.999, 1.0, 512),
    ):
        for free in (False, True):
            inputs = golden.inputs.alike(
                1, run.cut(T, 64), 2, cosine=cosine, beta=beta, shared_queries=not free, positive=not free,
                dtype=run.dtype, device=run.device,
            )  # fmt: skip
            label = f"cosine {cosine} beta {beta} T {T}{', free queries' if free else ''}"
            _near_identical(run, inputs, label)


@case("COLLINEAR", "near-identical keys, beta near 1, hardly any decay")
def collinear(run: Run) -> None:
    _near_identical(run, golden.inputs.collinear(1, 512, 2, dtype=run.dtype, device=run.device), "")


def _near_identical(run: Run, inputs: Inputs, label: str) -> None:
    if (run.backend, run.device.type, run.dtype) != ("tilelang", "cuda", torch.bfloat16):
        run.accuracy(inputs, label, stable=False, limit=COLLINEAR_LIMIT)
        return
    results = zip(("o", "state"), run.chunk_kda(**inputs), recurrence(**inputs), strict=True)
    for what, actual, expected in results:
        run.close(f"{label} {what}".strip(), actual, expected, float("inf"), COLLINEAR_BF16_LIMIT)


@case("SPLIT", "sequences cut into segments of 1 to 3 chunks, where a backend does that")
def split(run: Run) -> None:
    with cut_into_segments("1"):
        sizes = range(0, 201, run.cut(1, 50))
        run.accuracy(run.stable(1, sum(sizes), 1, 64, lengths=sizes), "lengths 0 to 200")
        run.accuracy(run.stable(1, 200, 2, 128, V=64, HV=4, state_v_first=False, initial_state=True), "HV 4 H 2 V 64")
    with cut_into_segments("2"):
        for gate in (0.0, -5.0, "mixed"):
            calm = gate != 0.0  # as above
            fixed = run.stable(2, run.cut(500, 150), 1, gate=gate, initial_state=True)
            run.accuracy(fixed, f"fixed length, gate {gate}", stable=calm)
            packed = run.stable(1, 400, 2, gate=gate, lengths=[13, 0, run.cut(350, 100)], initial_state=True)
            run.accuracy(packed, f"packed, gate {gate}", stable=calm)
    with cut_into_segments("3"):
        _near_identical(run, golden.inputs.collinear(1, run.cut(512, 128), 2, dtype=run.dtype, device=run.device), "")
        inputs = run.stable(1, run.cut(700, 150), 2, lengths=[run.cut(636, 86), 64], initial_state=True)
        o, state = run.chunk_kda(**inputs)
        again_o, again_state = run.chunk_kda(**inputs)
        run.same_bits("once more, o", again_o, o)
        run.same_bits("once more, state", again_state, state)


@case("CANCEL", "the worst cancellation in u - wS of 64 random rescalings")
def cancel(run: Run) -> None:
    inputs = golden.inputs.cancellation_stress(1, 256, 2, dtype=run.dtype, device=run.device)
    run.accuracy(inputs, stable=False)


@case("L2NORM", "the norm flag changes the result, and both are right")
def l2norm(run: Run) -> None:
    inputs = run.stable(1, 200, 4)
    off, _ = run.chunk_kda(**inputs)
    on, _ = run.chunk_kda(**inputs, use_qk_l2norm_in_kernel=True)
    difference = (on.float() - off.float()).abs().max().item()
    run.holds("on against off", difference > 1e-4, f"largest difference {difference:.2e}, expected more than 1e-4")
    run.accuracy({**inputs, "use_qk_l2norm_in_kernel": True}, "on", stable=False)
    large = torch.ones(200, 1, 1, device=run.device).index_fill_(0, torch.arange(0, 200, 7, device=run.device), 1e20)
    if run.dtype != torch.float16:  # its numbers end at 65504, whose squares fp32 can add up
        huge = {name: (inputs[name].float() * large).to(run.dtype) for name in ("q", "k")}
        run.accuracy({**inputs, **huge, "use_qk_l2norm_in_kernel": True}, "squares beyond fp32", stable=False)
    run.accuracy({**inputs, "use_qk_l2norm_in_kernel": False}, "off")


@case("SOFTPLUS", "norm, softplus gate and sigmoid in the kernel")
def softplus(run: Run) -> None:
    run.accuracy(run.raw(2, 200, 2, HV=4, initial_state=True), stable=False)


@case("LOWERBOUND", "the gate with a lower bound of -5, with and without A_log")
def lowerbound(run: Run) -> None:
    inputs = run.raw(2, 200, 2, lower_bound=-5.0, initial_state=True)
    run.accuracy(inputs, "A_log", stable=False)
    run.accuracy({**inputs, "A_log": None}, "no A_log", stable=False)
    run.accuracy({**inputs, "dt_bias": None}, "no dt_bias", stable=False)


@case("SIGMOID", "the sigmoid of beta, and twice that")
def sigmoid(run: Run) -> None:
    inputs = run.stable(1, 200, 2)
    logits = {**inputs, "beta": torch.logit(inputs["beta"]), "use_beta_sigmoid_in_kernel": True}
    run.accuracy(logits, "sigmoid")
    run.accuracy({**logits, "allow_neg_eigval": True}, "doubled", stable=False)


@case("SCALE", "a scale of one's own")
def scale(run: Run) -> None:
    run.accuracy({**run.stable(1, 100, 2), "scale": 0.5})
