"""The Kimi Delta Attention layer around the two operators, as in the Kimi Linear paper (arXiv:2510.26692)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kda.ops import chunk_kda, fused_recurrent_kda

DECODE_TOKENS = 16
"""Up to this many tokens that continue a cache run token by token: a chunk would be mostly padding."""

_INITIAL_RATE = (1e-3, 1e-1)
_INITIAL_A = (1.0, 16.0)


@dataclass(frozen=True)
class KimiDeltaCache:
    """All that the layer remembers of the tokens so far; its size doesn't depend on how many they were.

    A forward pass reads its cache and returns a new one, so one cache can be continued in several ways.
    """

    conv: tuple[Tensor, Tensor, Tensor]  # [N, conv_size - 1, channels]: last inputs of the q, k, v convolutions
    state: Tensor  # [N, HV, V, K] fp32


class ShortConvolution(nn.Conv1d):
    """Causal depthwise convolution over time, then SiLU: y[t] = silu(sum_j weight[:, 0, j] * x[t - (W - 1) + j])."""

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__(channels, channels, kernel_size, groups=channels, bias=False)

    def forward(  # type: ignore[override]  # it returns what the next call continues from as well
        self, x: Tensor, tail: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Args:
            x: `[B, T, C]`; with `cu_seqlens` `[1, T, C]`.
            tail: `[N, W - 1, C]`, the inputs before each sequence's first; zeros if None.
            cu_seqlens: int32 or int64 `[N + 1]`.

        Returns:
            y as x (with `cu_seqlens`, rows past its last value are of no meaning), and the next call's `tail`.
        """  # fmt: skip
        (B, T, C), past = x.shape, self.kernel_size[0] - 1
        N = B if cu_seqlens is None else len(cu_seqlens) - 1
        tail = x.new_zeros(N, past, C) if tail is None else tail.to(x.dtype)
        if cu_seqlens is None:
            window = torch.cat([tail, x], dim=1)
            return self._slide(window), window[:, T:].clone()
        # Each sequence behind its own tail in one buffer, so that none reaches into its neighbour; padding comes last.
        cu = cu_seqlens.long()
        tokens = torch.arange(T, device=x.device)
        rows = tokens + past * torch.searchsorted(cu, tokens, right=True)
        behind = past * torch.arange(N, device=x.device)[:, None] + torch.arange(past, device=x.device)
        window = x.new_zeros(1, T + past * (N + 1), C).index_copy(1, rows, x)
        window = window.index_copy(1, (cu[:-1, None] + behind).flatten(), tail.reshape(1, N * past, C))
        return self._slide(window)[:, rows - past], window[0, cu[1:, None] + behind]

    def _slide(self, window: Tensor) -> Tensor:
        # Shifted products keep the channels contiguous, as the operators read them; a convolution transposes twice.
        W, weight = self.kernel_size[0], self.weight.to(window.dtype)
        T = window.shape[1] - W + 1
        shifted = (window[:, j : j + T] * weight[:, 0, j] for j in range(1, W))
        return F.silu(sum(shifted, window[:, :T] * weight[:, 0, 0]))


class KimiDeltaAttention(nn.Module):
    """Token mixer with a constant-size state: projections, short convolution, KDA, gated RMS norm, projection.

    q, k = L2Norm(SiLU(ShortConv(W x)));  v = SiLU(ShortConv(W x));  beta = sigmoid(W x);
    log decay = -exp(A_log) * softplus(W_up W_down x + dt_bias)  (per key channel; otherwise with `lower_bound`);
    y = W_o (sigmoid(W_up W_down x) * RMSNorm(KDA(q, k, v, log decay, beta))).

    Norm, gate and sigmoid run inside the operator. Parameters are named as in the published Kimi Linear models.

    Initial values: `A_log` is the log of uniform [1, 16] and `dt_bias` the inverse softplus of log-uniform
    [0.001, 0.1], as in Mamba-2 (arXiv:2405.21060, reference code), so that a token first decays the state by
    exp(-A·dt). With `lower_bound` the same range is spent otherwise: `A_log` is 0, and `dt_bias` makes the log
    decay a log-uniform [0.001, 0.1] share of `lower_bound`.

    Args:
        hidden_size: width of x and y.
        num_heads: H, heads of q and k.
        head_dim: K, and the rank of both low-rank projections.
        num_v_heads: HV, a multiple of H; H if None.
        v_head_dim: V; K if None.
        conv_size: W, taps of the short convolutions.
        lower_bound: None, or in [-5, 0): the gate formula with a bounded log decay.
        norm_eps: eps of the output norm.
        backend: passed through to the operators; see `kda.chunk_kda`.

    Raises:
        ValueError: `num_v_heads` is not a multiple of `num_heads`, or a size is not positive.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int = 128,
        num_v_heads: int | None = None,
        v_head_dim: int | None = None,
        conv_size: int = 4,
        lower_bound: float | None = None,
        norm_eps: float = 1e-5,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        H, K, HV, V = num_heads, head_dim, num_v_heads or num_heads, v_head_dim or head_dim
        if min(hidden_size, H, K, HV, V, conv_size) < 1:
            raise ValueError(f"expected positive sizes, got {hidden_size=}, {H=}, {K=}, {HV=}, {V=}, {conv_size=}")
        if HV % H:
            raise ValueError(f"num_v_heads: expected a multiple of num_heads = {H}, got {HV}")
        self.hidden_size, self.lower_bound, self.backend = hidden_size, lower_bound, backend
        self.num_heads, self.head_dim, self.num_v_heads, self.v_head_dim = H, K, HV, V

        self.q_proj = nn.Linear(hidden_size, H * K, bias=False)
        self.k_proj = nn.Linear(hidden_size, H * K, bias=False)
        self.v_proj = nn.Linear(hidden_size, HV * V, bias=False)
        self.q_conv1d = ShortConvolution(H * K, conv_size)
        self.k_conv1d = ShortConvolution(H * K, conv_size)
        self.v_conv1d = ShortConvolution(HV * V, conv_size)
        self.f_a_proj = nn.Linear(hidden_size, K, bias=False)
        self.f_b_proj = nn.Linear(K, HV * K, bias=False)
        self.A_log = nn.Parameter(torch.empty(HV))
        self.dt_bias = nn.Parameter(torch.empty(HV * K))
        self.b_proj = nn.Linear(hidden_size, HV, bias=False)
        self.g_a_proj = nn.Linear(hidden_size, K, bias=False)
        self.g_b_proj = nn.Linear(K, HV * V, bias=False)
        self.o_norm = nn.RMSNorm(V, eps=norm_eps)
        self.o_proj = nn.Linear(HV * V, hidden_size, bias=False)
        self._reset_gate()

    @torch.no_grad()
    def _reset_gate(self) -> None:
        rate = self.dt_bias.uniform_(*map(math.log, _INITIAL_RATE)).exp()
        if self.lower_bound is None:
            self.A_log.uniform_(*_INITIAL_A).log_()
            self.dt_bias.copy_(rate + torch.log(-torch.expm1(-rate)))
        else:
            self.A_log.zero_()
            self.dt_bias.copy_(torch.logit(rate))

    def forward(
        self,
        x: Tensor,
        cache: KimiDeltaCache | None = None,
        cu_seqlens: Tensor | None = None,
        output_cache: bool = False,
    ) -> tuple[Tensor, KimiDeltaCache | None]:
        """Mix the tokens of x, each with those before it in its sequence.

        Without a cache, or with many tokens, this runs `chunk_kda`; a few tokens that continue a cache (up to
        `DECODE_TOKENS`, or one for each sequence of `cu_seqlens` on average) run `fused_recurrent_kda`.
        Gradients reach x, every parameter and the cache.

        Args:
            x: `[B, T, hidden_size]`, of the parameters' dtype (bf16, fp16, fp32; fp64 where the backend takes it).
            cache: what an earlier call returned: x continues those sequences.
            cu_seqlens: int32 or int64 `[N + 1]` on x's device, with B = 1: N packed sequences, as in `kda.chunk_kda`.
            output_cache: also return the cache after the last token.

        Returns:
            y as x, and the cache or None.

        Raises:
            ValueError: x or the cache has the wrong shape; and whatever the operators raise.
        """
        self._check(x, cache, cu_seqlens)
        inputs, tails = self.operator_inputs(x, cache, cu_seqlens)
        few = x.shape[1] <= (DECODE_TOKENS if cu_seqlens is None else len(cu_seqlens) - 1)
        kda = fused_recurrent_kda if cache is not None and few else chunk_kda
        o, state = kda(**inputs, output_final_state=output_cache, backend=self.backend)
        gate = self.g_b_proj(self.g_a_proj(x)).unflatten(-1, o.shape[2:])
        o = self.o_norm(o.to(self.o_norm.weight.dtype))  # under autocast o comes in half precision
        y = self.o_proj((o * gate.sigmoid()).flatten(2))
        return y, None if state is None else KimiDeltaCache(tails, state)

    def operator_inputs(
        self, x: Tensor, cache: KimiDeltaCache | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[dict[str, Any], tuple[Tensor, Tensor, Tensor]]:
        """The keyword arguments with which `forward` calls the operator, and the next cache's convolution tails."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        tails = (None, None, None) if cache is None else cache.conv
        q, q_tail = self.q_conv1d(q, tails[0], cu_seqlens)
        k, k_tail = self.k_conv1d(k, tails[1], cu_seqlens)
        v, v_tail = self.v_conv1d(v, tails[2], cu_seqlens)
        parameter_dtype = torch.promote_types(q.dtype, torch.float32)
        inputs = {
            "q": q.unflatten(-1, (self.num_heads, self.head_dim)),
            "k": k.unflatten(-1, (self.num_heads, self.head_dim)),
            "v": v.unflatten(-1, (self.num_v_heads, self.v_head_dim)),
            "g": self.f_b_proj(self.f_a_proj(x)).unflatten(-1, (self.num_v_heads, self.head_dim)),
            "beta": self.b_proj(x),
            "initial_state": None if cache is None else cache.state,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "A_log": self.A_log.to(parameter_dtype),
            "dt_bias": self.dt_bias.to(parameter_dtype),
            "lower_bound": self.lower_bound,
            "cu_seqlens": cu_seqlens,
        }
        return inputs, (q_tail, k_tail, v_tail)

    def _check(self, x: Tensor, cache: KimiDeltaCache | None, cu_seqlens: Tensor | None) -> None:
        if x.dim() != 3 or x.shape[2] != self.hidden_size:
            raise ValueError(f"x: expected [B, T, hidden_size = {self.hidden_size}], got {list(x.shape)}")
        if cu_seqlens is not None and x.shape[0] != 1:
            raise ValueError(f"x: expected batch size 1 beside cu_seqlens, got {list(x.shape)}")
        N = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        if cache is not None and cache.state.shape[0] != N:
            raise ValueError(f"cache: expected N = {N} sequences as x, got a cache of {cache.state.shape[0]}")
