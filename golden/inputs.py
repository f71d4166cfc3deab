"""Seeded inputs: each generator returns the keyword arguments of one call of the operator.

`stable(B, T, H, K=128, V=None, HV=None, *, lengths=None, seed=0, ...)`: what all generators take is told at `Sizes`.
Everything is drawn on the CPU from one `torch.Generator` and then moved, so that every device sees the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from .chunk import chunk_kda_stages

GATES = ("logsigmoid", "half_1000", "mixed")
"""Names that `stable` takes for its gate, beside any number."""

TRIALS = 64
"""Rescalings that `cancellation_stress` searches."""


@dataclass
class Sizes:
    """Sizes and options of a call: q, k `[B, T, H, K]`, v `[B, T, HV, V]`, g `[B, T, HV, K]`, beta `[B, T, HV]`.

    Raises ValueError if `lengths` comes with B != 1 or exceeds T.
    """

    B: int
    T: int
    H: int
    K: int = 128
    V: int = 0  # K
    HV: int = 0  # H
    _: KW_ONLY
    lengths: Sequence[int] | None = None  # adds int32 cu_seqlens; tokens of T beyond their sum are padding
    dtype: torch.dtype = torch.bfloat16  # of q, k and v
    initial_state: bool = False  # adds one of 0.1 N(0, 1), fp32 (fp64 beside fp64 inputs)
    state_v_first: bool = True
    seed: int = 0
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        self.V, self.HV = self.V or self.K, self.HV or self.H
        total = sum(self.lengths or ())
        if self.lengths is not None and (self.B != 1 or total > self.T):
            raise ValueError(f"lengths: expected B = 1 and a sum <= T = {self.T}, got B = {self.B}, a sum of {total}")
        self.generator = torch.Generator("cpu").manual_seed(self.seed)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float32, device="cpu")

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float32, device="cpu")

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """N(0, 1)."""
        qk = (self.B, self.T, self.H, self.K)
        return self.randn(*qk), self.randn(*qk), self.randn(self.B, self.T, self.HV, self.V)

    def call(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> dict[str, Any]:
        """The call's keyword arguments, on the device; g and beta keep their dtype."""
        call = {"q": q.to(self.dtype), "k": k.to(self.dtype), "v": v.to(self.dtype), "g": g, "beta": beta} | options
        if self.lengths is not None:
            call["cu_seqlens"] = torch.tensor([0, *self.lengths], device="cpu").cumsum(0).int()
        if self.initial_state:
            N = self.B if self.lengths is None else len(self.lengths)
            shape = (N, self.HV, self.V, self.K) if self.state_v_first else (N, self.HV, self.K, self.V)
            state = 0.1 * self.randn(*shape)
            call["initial_state"] = state.double() if self.dtype == torch.float64 else state
        return _moved(call | {"output_final_state": True, "state_v_first": self.state_v_first}, self.device)


def stable(*sizes: int, gate: str | float = "logsigmoid", **options: Any) -> dict[str, Any]:
    """Inputs that stay well scaled: q, k, v ~ 0.1 N(0, 1), beta = sigmoid(N(0, 1)), log decay by `gate`, both fp32.

    `gate`: "logsigmoid" of N(0, 1); a number, everywhere; "half_1000", -1000 on a random half of the tokens;
    "mixed", a random choice of 0, -1000, -inf and logsigmoid for every token and channel.
    """
    draw = Sizes(*sizes, **options)
    q, k, v = (0.1 * x for x in draw.qkv())
    return draw.call(q, k, v, _gate(draw, gate), torch.sigmoid(draw.randn(draw.B, draw.T, draw.HV)))


def raw(
    *sizes: int, lower_bound: float | None = None, allow_neg_eigval: bool = False, **options: Any
) -> dict[str, Any]:
    """The form that models call: unnormalised q and k, raw gate and beta logits ~ N(0, 1), all in q's dtype.

    A_log = log U(1, 16) `[HV]` and dt_bias = softplus⁻¹ of a log-uniform step in [1e-3, 0.1] `[HV * K]`, both fp32;
    norm, gate and sigmoid are switched on.
    """
    draw = Sizes(*sizes, **options)
    q, k, v = draw.qkv()
    g, beta = draw.randn(draw.B, draw.T, draw.HV, draw.K), draw.randn(draw.B, draw.T, draw.HV)
    step = torch.exp(draw.rand(draw.HV * draw.K) * math.log(100.0) + math.log(1e-3))
    return draw.call(
        *(q, k, v, g.to(draw.dtype), beta.to(draw.dtype)),
        A_log=(1.0 + 15.0 * draw.rand(draw.HV)).log(),
        dt_bias=step + torch.log(-torch.expm1(-step)),
        lower_bound=lower_bound,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=allow_neg_eigval,
    )


def collinear(*sizes: int, **options: Any) -> dict[str, Any]:
    """The hardest (I + Akk)⁻¹: positive unit keys and queries within 1 % of one direction a head, beta -> 1, g ~ 0."""
    draw = Sizes(*sizes, **options)
    q, k, v = draw.qkv()
    direction = 0.5 + draw.rand(draw.H, draw.K)
    q, k = (normalize(direction * (1.0 + 0.01 * x), dim=-1) for x in (q, k))
    g = -1e-4 * draw.rand(draw.B, draw.T, draw.HV, draw.K)
    beta = 1.0 - 1e-3 * draw.rand(draw.B, draw.T, draw.HV)
    return draw.call(q, k, v.abs(), g, beta)


def alike(
    *sizes: int, cosine: float = 0.999, beta: float = 0.99, shared_queries: bool = True, positive: bool = True,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Unit keys of one pairwise cosine, one beta for all tokens, hardly any decay: roundings add up along the keys.

    With `shared_queries` the queries have the keys' direction, with `positive` values are not negative.
    """
    draw = Sizes(*sizes, **options)
    q, k, v = draw.qkv()
    along = cosine**0.5 * normalize(draw.randn(draw.H, draw.K), dim=-1)
    k = normalize(along + (1.0 - cosine) ** 0.5 * normalize(k, dim=-1), dim=-1)
    if shared_queries:
        q = along + (1.0 - cosine) ** 0.5 * normalize(q, dim=-1)
    g = -1e-4 * draw.rand(draw.B, draw.T, draw.HV, draw.K)
    step = torch.full((draw.B, draw.T, draw.HV), beta, dtype=torch.float32, device="cpu")
    return draw.call(normalize(q, dim=-1), k, v.abs() if positive else v, g, step)


def cancellation_stress(*sizes: int, device: torch.device | str = "cpu", **options: Any) -> dict[str, Any]:
    """Of 64 random rescalings of k, v, g and beta of stable inputs, the one in which u - w S cancels most."""
    base = stable(*sizes, **options)
    draw = Sizes(4, 1, 1, seed=options.get("seed", 0))
    trials = (_rescaled(base, draw.rand(4).tolist()) for _ in range(TRIALS))
    return _moved(max(trials, key=cancellation), device)


def cancellation(call: dict[str, Any]) -> float:
    """Largest |u| / |u - w S| of any element, among those with |u| above the RMS of u in their chunk and head."""
    stages = chunk_kda_stages(**call, dtype=torch.float32)
    u, v_new = stages["u"].abs(), stages["v_new"].abs()
    counts = u > u.square().mean((-1, -2), keepdim=True).sqrt()
    return torch.where(counts, u / v_new.clamp(min=torch.finfo(u.dtype).tiny), 0.0).max().item()


def _rescaled(call: dict[str, Any], x: list[float]) -> dict[str, Any]:
    """k up to the edge of beta |k|² <= 2, where the delta rule is still stable; g to a hundredth; v over decades."""
    return call | {
        "k": call["k"] * (0.5 + 0.7 * x[0]),
        "v": call["v"] * 10.0 ** (2.0 * x[1] - 1.0),
        "g": call["g"] * 10.0 ** (-2.0 * x[2]),
        "beta": call["beta"] * (0.5 + 0.5 * x[3]),
    }


def _gate(draw: Sizes, gate: str | float) -> Tensor:
    shape = draw.B, draw.T, draw.HV, draw.K
    if not isinstance(gate, str):
        return torch.full(shape, float(gate), dtype=torch.float32, device="cpu")
    if gate not in GATES:
        raise ValueError(f"gate: expected a number or one of {', '.join(GATES)}, got {gate!r}")
    g = logsigmoid(draw.randn(*shape))
    if gate == "half_1000":
        return g.masked_fill(draw.rand(draw.B, draw.T, 1, 1) < 0.5, -1000.0)
    if gate == "mixed":
        kind = draw.rand(*shape)
        return g.masked_fill(kind < 0.5, 0.0).masked_fill(kind < 0.1, -1000.0).masked_fill(kind < 0.05, -math.inf)
    return g


def _moved(call: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in call.items()}
