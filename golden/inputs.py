"""Seeded inputs: each generator returns the keyword arguments of one call of the operator.

Everything is drawn on the CPU from one `torch.Generator` and then moved, so that every device sees the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from .chunk import chunk_kda_stages

GATES = ("logsigmoid", "half_1000", "mixed")
"""Names that `stable` takes for its gate, beside any number."""

TRIALS = 64
"""Rescalings that `cancellation_stress` searches."""


def stable(
    B: int,
    T: int,
    H: int,
    K: int = 128,
    V: int | None = None,
    HV: int | None = None,
    *,
    lengths: Sequence[int] | None = None,
    gate: str | float = "logsigmoid",
    dtype: torch.dtype = torch.bfloat16,
    initial_state: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
    state_v_first: bool = True,
) -> dict[str, Any]:
    """Inputs that stay well scaled: q, k, v ~ 0.1 N(0, 1), beta = sigmoid(N(0, 1)), log decay by `gate`.

    `gate`: "logsigmoid" of N(0, 1); a number, everywhere; "half_1000", -1000 on a random half of the tokens;
    "mixed", a random choice of 0, -1000, -inf and logsigmoid for every token and channel.
    q, k, v in `dtype`, g and beta fp32. With `lengths`, B must be 1 and the call is `[1, T, ...]` with int32
    cu_seqlens; T beyond their sum is padding. `initial_state`: 0.1 N(0, 1), fp32.
    """
    draw = _Draw(B, T, H, K, V, HV, lengths, dtype, device, seed)
    q, k, v = (0.1 * x for x in draw.qkv())
    g = _gate(draw, gate)
    beta = torch.sigmoid(draw.randn(B, T, draw.HV))
    return draw.call(q, k, v, g, beta, initial_state, state_v_first)


def raw(
    B: int,
    T: int,
    H: int,
    K: int = 128,
    V: int | None = None,
    HV: int | None = None,
    *,
    lengths: Sequence[int] | None = None,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    initial_state: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
    state_v_first: bool = True,
) -> dict[str, Any]:
    """The form that models call: unnormalised q and k, raw gate and beta logits ~ N(0, 1), all in `dtype`.

    A_log = log U(1, 16) `[HV]` and dt_bias = softplus⁻¹ of a log-uniform step in [1e-3, 0.1] `[HV * K]`, both fp32;
    norm, gate and sigmoid are switched on.
    """
    draw = _Draw(B, T, H, K, V, HV, lengths, dtype, device, seed)
    q, k, v = draw.qkv()
    g, beta = draw.randn(B, T, draw.HV, K).to(dtype), draw.randn(B, T, draw.HV).to(dtype)
    step = torch.exp(draw.rand(draw.HV * K) * math.log(100.0) + math.log(1e-3))
    call = draw.call(q, k, v, g, beta, initial_state, state_v_first)
    return call | {
        "A_log": (1.0 + 15.0 * draw.rand(draw.HV)).log().to(device),
        "dt_bias": (step + torch.log(-torch.expm1(-step))).to(device),
        "lower_bound": lower_bound,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": allow_neg_eigval,
    }


def collinear(
    B: int,
    T: int,
    H: int,
    K: int = 128,
    V: int | None = None,
    HV: int | None = None,
    *,
    lengths: Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    initial_state: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
    state_v_first: bool = True,
) -> dict[str, Any]:
    """The hardest (I + Akk)⁻¹: all-positive unit keys and queries within 1 % of one direction, beta -> 1, g ~ 0."""
    draw = _Draw(B, T, H, K, V, HV, lengths, dtype, device, seed)
    q, k, v = draw.qkv()
    direction = 0.5 + draw.rand(H, K)
    q, k = (normalize(direction * (1.0 + 0.01 * x), dim=-1) for x in (q, k))
    g = -1e-4 * draw.rand(B, T, draw.HV, K)
    beta = 1.0 - 1e-3 * draw.rand(B, T, draw.HV)
    return draw.call(q, k, v.abs(), g, beta, initial_state, state_v_first)


def cancellation_stress(
    B: int,
    T: int,
    H: int,
    K: int = 128,
    V: int | None = None,
    HV: int | None = None,
    *,
    lengths: Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    initial_state: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
    state_v_first: bool = True,
) -> dict[str, Any]:
    """Of 64 random rescalings of stable inputs, the one in which v_new = u - w S cancels most.

    Each trial scales k, v, g and beta as wholes; the measure is the largest RMS of u over that of u - w S in any chunk.
    """
    base = stable(B, T, H, K, V, HV, lengths=lengths, dtype=dtype, initial_state=initial_state, seed=seed,
                  state_v_first=state_v_first)  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    trials = (_rescaled(base, torch.rand(4, generator=generator).tolist()) for _ in range(TRIALS))
    worst = max(trials, key=_cancellation)
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in worst.items()}


def _rescaled(call: dict[str, Any], x: list[float]) -> dict[str, Any]:
    """k up to the edge of beta |k|² <= 2, where the delta rule is still stable; g to a hundredth; v over decades."""
    return call | {
        "k": call["k"] * (0.5 + 0.7 * x[0]),
        "v": call["v"] * 10.0 ** (2.0 * x[1] - 1.0),
        "g": call["g"] * 10.0 ** (-2.0 * x[2]),
        "beta": call["beta"] * (0.5 + 0.5 * x[3]),
    }


def _cancellation(call: dict[str, Any]) -> float:
    stages = chunk_kda_stages(**call, dtype=torch.float32)
    u, v_new = (stages[name].double().square().mean((-1, -2)).sqrt() for name in ("u", "v_new"))
    return (u / v_new.clamp(min=1e-30)).max().item()


def _gate(draw: _Draw, gate: str | float) -> Tensor:
    shape = draw.B, draw.T, draw.HV, draw.K
    if not isinstance(gate, str):
        return torch.full(shape, float(gate))
    if gate not in GATES:
        raise ValueError(f"gate: expected a number or one of {', '.join(GATES)}, got {gate!r}")
    g = logsigmoid(draw.randn(*shape))
    if gate == "half_1000":
        return g.masked_fill(draw.rand(draw.B, draw.T, 1, 1) < 0.5, -1000.0)
    if gate == "mixed":
        kind = draw.rand(*shape)
        return g.masked_fill(kind < 0.5, 0.0).masked_fill(kind < 0.1, -1000.0).masked_fill(kind < 0.05, -torch.inf)
    return g


class _Draw:
    """One seeded stream of numbers for a call of the given sizes."""

    def __init__(
        self,
        B: int,
        T: int,
        H: int,
        K: int,
        V: int | None,
        HV: int | None,
        lengths: Sequence[int] | None,
        dtype: torch.dtype,
        device: torch.device | str,
        seed: int,
    ) -> None:
        if lengths is not None and (B != 1 or sum(lengths) > T):
            raise ValueError(f"lengths: expected B = 1 and a sum <= T = {T}, got B = {B} and a sum of {sum(lengths)}")
        self.B, self.T, self.H, self.K = B, T, H, K
        self.V, self.HV = K if V is None else V, H if HV is None else HV
        self.lengths, self.dtype, self.device = lengths, dtype, device
        self.generator = torch.Generator().manual_seed(seed)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        B, T = self.B, self.T
        return self.randn(B, T, self.H, self.K), self.randn(B, T, self.H, self.K), self.randn(B, T, self.HV, self.V)

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: bool, state_v_first: bool
    ) -> dict[str, Any]:
        call = {"q": q.to(self.dtype), "k": k.to(self.dtype), "v": v.to(self.dtype), "g": g, "beta": beta}
        if self.lengths is not None:
            call["cu_seqlens"] = torch.tensor([0, *self.lengths]).cumsum(0).int()
        if initial_state:
            N = self.B if self.lengths is None else len(self.lengths)
            last = (self.V, self.K) if state_v_first else (self.K, self.V)
            call["initial_state"] = 0.1 * self.randn(N, self.HV, *last)
        moved = {name: x.to(self.device) for name, x in call.items()}
        return moved | {"output_final_state": True, "state_v_first": state_v_first}
