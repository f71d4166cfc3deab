"""The Kimi Delta Attention layer around the two operators, as in the Kimi Linear paper (arXiv:2510.26692)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kda import backends
from kda.checks import check_cu_seqlens
from kda.convolution import ShortConvolution
from kda.golden.constants import LOWER_BOUND_RANGE
from kda.ops import chunk_kda, fused_recurrent_kda

DECODE_TOKENS = 16
"""Up to this many tokens that continue a cache run token by token: a chunk would be mostly padding."""

_INITIAL_RATE = (1e-3, 1e-1)
_INITIAL_A = (1.0, 16.0)

_FLA_NAMES = {"f_proj.0": "f_a_proj", "f_proj.1": "f_b_proj", "g_proj.0": "g_a_proj", "g_proj.1": "g_b_proj"}
"""flash-linear-attention's names of the low-rank projections, which a state dict may have too."""


class KimiDeltaCache(NamedTuple):
    """All that the layer remembers of the tokens so far; its size doesn't depend on how many they were.

    A forward pass reads its cache and returns a new one, so one cache can be continued in several ways. It is a pytree,
    and `torch.load` takes it with `weights_only=True` once this module is imported.
    """

    conv: tuple[Tensor, Tensor, Tensor]  # [N, conv_size - 1, channels]: last inputs of the q, k, v convolutions
    state: Tensor  # [N, HV, V, K] fp32


torch.serialization.add_safe_globals([KimiDeltaCache])


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

    `A_log` and `dt_bias` are kept in fp32 whatever the layer's dtype (`.bfloat16()` leaves them as they are), and have
    the attribute `_no_weight_decay`, by which optimisers' parameter groups leave them out of weight decay. State dicts
    may hold both in any shape with the right number of elements; published ones have A_log as `[1, 1, HV, 1]`. They may
    have flash-linear-attention's names too, whose layer is one with `gate_bias` and a `gate_rank` of V.

    Args:
        hidden_size: width of x and y.
        num_heads: H, heads of q and k.
        head_dim: K.
        num_v_heads: HV, a multiple of H; H if None.
        v_head_dim: V; K if None.
        conv_size: W, taps of the short convolutions.
        lower_bound: None, or in [-5, 0): the gate formula with a bounded log decay.
        allow_neg_eigval: beta = 2 sigmoid(W x), which lets the state's transition have negative eigenvalues.
        gate_rank: rank of both low-rank projections; K if None.
        gate_bias: a bias in the output gate's second projection, as flash-linear-attention has it.
        norm_eps: eps of the output norm.
        backend: passed through to the operators; see `kda.chunk_kda`.
        device, dtype: of the parameters, as for other modules.

    Raises:
        ValueError: a size is not positive, `num_v_heads` is not a multiple of `num_heads`, `lower_bound` is out of its
            range, or `backend` is no known name.
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
        *,
        allow_neg_eigval: bool = False,
        gate_rank: int | None = None,
        gate_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        H, K, HV, V = num_heads, head_dim, num_v_heads or num_heads, v_head_dim or head_dim
        rank = K if gate_rank is None else gate_rank
        if min(hidden_size, H, K, HV, V, conv_size, rank) < 1:
            sizes = f"{hidden_size=}, {H=}, {K=}, {HV=}, {V=}, {conv_size=}, gate_rank={rank}"
            raise ValueError(f"expected positive sizes, got {sizes}")
        if HV % H:
            raise ValueError(f"num_v_heads: expected a multiple of num_heads = {H}, got {HV}")
        low, high = LOWER_BOUND_RANGE
        if lower_bound is not None and not low <= lower_bound < high:
            raise ValueError(f"lower_bound: expected None or a value in [{low:g}, {high:g}), got {lower_bound}")
        if backend not in (known := (None, "auto", *backends.names())):
            raise ValueError(f"backend: expected one of {', '.join(map(str, known))}, got {backend!r}")
        self.hidden_size, self.lower_bound, self.backend = hidden_size, lower_bound, backend
        self.num_heads, self.head_dim, self.num_v_heads, self.v_head_dim = H, K, HV, V
        self.allow_neg_eigval = allow_neg_eigval

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        gate_dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        self.q_proj = nn.Linear(hidden_size, H * K, bias=False, **factory)
        self.k_proj = nn.Linear(hidden_size, H * K, bias=False, **factory)
        self.v_proj = nn.Linear(hidden_size, HV * V, bias=False, **factory)
        self.q_conv1d = ShortConvolution(H * K, conv_size, **factory)
        self.k_conv1d = ShortConvolution(H * K, conv_size, **factory)
        self.v_conv1d = ShortConvolution(HV * V, conv_size, **factory)
        self.f_a_proj = nn.Linear(hidden_size, rank, bias=False, **factory)
        self.f_b_proj = nn.Linear(rank, HV * K, bias=False, **factory)
        self.A_log = nn.Parameter(torch.empty(HV, device=device, dtype=gate_dtype))
        self.dt_bias = nn.Parameter(torch.empty(HV * K, device=device, dtype=gate_dtype))
        self.b_proj = nn.Linear(hidden_size, HV, bias=False, **factory)
        self.g_a_proj = nn.Linear(hidden_size, rank, bias=False, **factory)
        self.g_b_proj = nn.Linear(rank, HV * V, bias=gate_bias, **factory)
        self.o_norm = nn.RMSNorm(V, eps=norm_eps, **factory)
        self.o_proj = nn.Linear(HV * V, hidden_size, bias=False, **factory)
        self._mark_gate()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw `A_log` and `dt_bias` anew, the parameters that are the layer's own; its parts reset theirs."""
        rate = self.dt_bias.uniform_(*map(math.log, _INITIAL_RATE)).exp()
        if self.lower_bound is None:
            self.A_log.uniform_(*_INITIAL_A).log_()
            self.dt_bias.copy_(rate + torch.log(-torch.expm1(-rate)))
        else:
            self.A_log.zero_()
            self.dt_bias.copy_(torch.logit(rate))

    def _mark_gate(self) -> None:
        for parameter in (self.A_log, self.dt_bias):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KimiDeltaAttention:
        """What `.to()`, `.bfloat16()` and `.to_empty()` come down to: the gate's parameters never get narrower."""
        own = [x for parameter in (self.A_log, self.dt_bias) for x in (parameter, parameter.grad) if x is not None]

        def keep_wide(x: Tensor) -> Tensor:
            moved = fn(x)
            if any(x is mine for mine in own) and moved.dtype.itemsize < x.dtype.itemsize:
                return x.to(moved.device)
            return moved

        super()._apply(keep_wide, recurse)
        self._mark_gate()  # a conversion may have made new parameters
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for theirs, mine in _FLA_NAMES.items():
            for name in ("weight", "bias"):
                if (x := state_dict.pop(f"{prefix}{theirs}.{name}", None)) is not None:
                    state_dict[f"{prefix}{mine}.{name}"] = x
        for name in ("A_log", "dt_bias"):
            own, given = getattr(self, name), state_dict.get(prefix + name)
            if isinstance(given, Tensor) and given.shape != own.shape and given.numel() == own.numel():
                state_dict[prefix + name] = given.reshape(own.shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(
        self,
        x: Tensor,
        cache: KimiDeltaCache | None = None,
        cu_seqlens: Tensor | None = None,
        output_cache: bool = False,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, KimiDeltaCache | None]:
        """Mix the tokens of x, each with those before it in its sequence.

        Without a cache, or with many tokens, this runs `chunk_kda`; a few tokens that continue a cache (up to
        `DECODE_TOKENS`, or one for each sequence of `cu_seqlens` on average) run `fused_recurrent_kda`.
        Gradients reach x, every parameter and the cache. What stands in padded rows of x, NaN included, reaches no
        other row, no state and no gradient.

        Args:
            x: `[B, T, hidden_size]`, of the parameters' dtype (bf16, fp16, fp32; fp64 where the backend takes it).
            cache: what an earlier call returned: x continues those sequences.
            cu_seqlens: int32 or int64 `[N + 1]` on x's device, with B = 1: N packed sequences, as in `kda.chunk_kda`.
                Rows of x before its first value and from its last one on are padding.
            output_cache: also return the cache after the last token.
            attention_mask: `[B, T]` on x's device, 0 or False for padded rows, wherever they stand (left, right or
                between); not beside `cu_seqlens`.

        Returns:
            y as x, 0 in padded rows, and the cache or None.

        Raises:
            ValueError: x, the cache or the mask has the wrong shape; and whatever the operators raise.
        """
        self._check(x, cache, cu_seqlens, attention_mask)
        if attention_mask is not None:
            return self._masked(x, cache, output_cache, attention_mask)
        return self._unmasked(x, cache, cu_seqlens, output_cache)

    def _unmasked(
        self, x: Tensor, cache: KimiDeltaCache | None, cu_seqlens: Tensor | None, output_cache: bool
    ) -> tuple[Tensor, KimiDeltaCache | None]:
        if cu_seqlens is None:
            few = cache is not None and x.shape[1] <= DECODE_TOKENS
            return self._mix(x, cache, None, output_cache, few)
        few = cache is not None and x.shape[1] <= len(cu_seqlens) - 1
        token = torch.arange(x.shape[1], device=x.device)
        padding = ((token < cu_seqlens[0]) | (token >= cu_seqlens[-1]))[None, :, None]
        y, cache = self._mix(x.masked_fill(padding, 0.0), cache, cu_seqlens, output_cache, few)
        return y.masked_fill(padding, 0.0), cache

    def _masked(
        self, x: Tensor, cache: KimiDeltaCache | None, output_cache: bool, mask: Tensor
    ) -> tuple[Tensor, KimiDeltaCache | None]:
        """The real rows packed, in their order, in front of the padded ones; the host reads nothing of the mask."""
        real = mask.bool()
        order = torch.argsort(~real.flatten(), stable=True)
        cu_seqlens = F.pad(real.sum(1).cumsum(0), (1, 0))
        y, cache = self._unmasked(x.flatten(0, 1)[order][None], cache, cu_seqlens, output_cache)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        return y[0, back].view_as(x), cache

    def _mix(
        self, x: Tensor, cache: KimiDeltaCache | None, cu_seqlens: Tensor | None, output_cache: bool, few: bool
    ) -> tuple[Tensor, KimiDeltaCache | None]:
        inputs, tails = self.operator_inputs(x, cache, cu_seqlens)
        kda = fused_recurrent_kda if few else chunk_kda
        o, state = kda(**inputs, output_final_state=output_cache, backend=self.backend)
        gate = self.g_b_proj(self.g_a_proj(x)).unflatten(-1, o.shape[2:])
        o = self.o_norm(o.to(self.o_norm.weight.dtype))  # under autocast o comes in half precision
        y = self.o_proj((o * gate.sigmoid()).flatten(2).to(gate.dtype))  # and the norm may be kept in fp32
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
            "allow_neg_eigval": self.allow_neg_eigval,
            "A_log": self.A_log.to(parameter_dtype),
            "dt_bias": self.dt_bias.to(parameter_dtype),
            "lower_bound": self.lower_bound,
            "cu_seqlens": cu_seqlens,
        }
        return inputs, (q_tail, k_tail, v_tail)

    def _check(self, x: Tensor, cache: KimiDeltaCache | None, cu_seqlens: Tensor | None, mask: Tensor | None) -> None:
        if x.dim() != 3 or x.shape[2] != self.hidden_size:
            raise ValueError(f"x: expected [B, T, hidden_size = {self.hidden_size}], got {list(x.shape)}")
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, x)
            if x.shape[0] != 1:
                raise ValueError(f"x: expected batch size 1 beside cu_seqlens, got {list(x.shape)}")
            if mask is not None:
                raise ValueError("attention_mask: expected None beside cu_seqlens, got a tensor")
        if mask is not None and mask.shape != x.shape[:2]:
            raise ValueError(f"attention_mask: expected [B, T] = {list(x.shape[:2])}, got {list(mask.shape)}")
        N = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        if cache is not None and cache.state.shape[0] != N:
            raise ValueError(f"cache: expected N = {N} sequences as x, got a cache of {cache.state.shape[0]}")
