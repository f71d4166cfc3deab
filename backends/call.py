"""The normalised call: the one description of an operator call, from the front end to every backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of computation and of the states beside q of `dtype`: fp32, or fp64 beside fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
"""The tensors of a call that may require grad."""


@dataclass(slots=True, eq=False, kw_only=True)
class KdaCall:
    """One checked call of `chunk_kda` or `fused_recurrent_kda`.

    Tensors are always batched: a TND call of rank 3 arrives here as `[1, T, ...]`. Tensors may be non-contiguous.
    A backend treats the call as read-only, `initial_state` under `inplace_final_state` excepted.
    """

    op: Literal["chunk_kda", "fused_recurrent_kda"]
    q: Tensor  # [B, T, H, K]   bf16, fp16, fp32 or fp64; k and v alike
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor  # [B, T, HV, K]  fp32 or q's dtype: log decay, or the raw gate with use_gate_in_kernel
    beta: Tensor  # [B, T, HV]  fp32 or q's dtype: step size, or logits with use_beta_sigmoid_in_kernel
    scale: float
    initial_state: Tensor | None = None  # [N, HV, V, K], or a pool [slots, HV, V, K]; [.., K, V] unless state_v_first
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    A_log: Tensor | None = None  # [HV]
    dt_bias: Tensor | None = None  # [HV * K]
    lower_bound: float | None = None
    cu_seqlens: Tensor | None = None  # [N + 1] int32 or int64; B is then 1
    state_v_first: bool = True
    # fused_recurrent_kda alone:
    inplace_final_state: bool = False
    ssm_state_indices: Tensor | None = None  # [N] or [N, S] int32 or int64, slots of the pool `initial_state`
    num_accepted_tokens: Tensor | None = None  # [N] int32 or int64, in 1..S

    # Shared by all calls of the same shapes, dtypes, devices and options: what a backend derives from these alone.
    memo: dict[Any, Any] = field(default_factory=dict)

    # Sizes, read off the tensors once.
    B: int = field(init=False)
    T: int = field(init=False)
    H: int = field(init=False)
    K: int = field(init=False)
    HV: int = field(init=False)
    V: int = field(init=False)
    N: int = field(init=False)  # number of sequences

    def __post_init__(self) -> None:
        self.B, self.T, self.H, self.K = self.q.shape
        self.HV, self.V = self.v.shape[2:]
        self.N = self.B if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of one state in the caller's layout: (HV, V, K), or (HV, K, V)."""
        return (self.HV, self.V, self.K) if self.state_v_first else (self.HV, self.K, self.V)

    @property
    def state_per_token(self) -> bool:
        """Whether the state after every token has a slot or a row of its own, not only each sequence's last one."""
        return self.ssm_state_indices is not None and self.ssm_state_indices.dim() == 2
