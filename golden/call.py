"""The golden's view of a call: the operator's arguments, with every layout flattened to one list of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .activation import Activation


@dataclass(eq=False)
class Call:
    """The arguments of `kda.chunk_kda` in its order; tensors come out of the constructor as `[tokens, heads, dim]`.

    Raises ValueError where shapes contradict each other; the front end's finer checks are not repeated here.
    """

    q: Tensor  # [B, T, H, K], or [T, H, K] / [1, T, H, K] with cu_seqlens; any float dtype, here and below
    k: Tensor  # as q
    v: Tensor  # [B, T, HV, V] ...
    g: Tensor  # [B, T, HV, K] ...   log decay <= 0, or the raw gate
    beta: Tensor  # [B, T, HV] ...
    scale: float | None = None  # K ** -0.5
    initial_state: Tensor | None = None  # [N, HV, V, K]; [N, HV, K, V] unless state_v_first
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    A_log: Tensor | None = None  # HV elements
    dt_bias: Tensor | None = None  # HV * K elements
    lower_bound: float | None = None
    cu_seqlens: Tensor | None = None  # [N + 1]
    state_v_first: bool = True

    starts: Tensor = field(init=False)  # [N] first token of each sequence
    lengths: Tensor = field(init=False)  # [N] tokens of each sequence
    o_shape: torch.Size = field(init=False)  # v's shape as it came

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.detach())
        self.o_shape = self.v.shape
        if self.cu_seqlens is None:
            if self.q.dim() != 4:
                raise ValueError(f"q: expected [B, T, H, K] without cu_seqlens, got {list(self.q.shape)}")
            B, T = self.q.shape[:2]
            self.starts = T * torch.arange(B, device=self.q.device)
            self.lengths = torch.full_like(self.starts, T)
        else:
            if self.q.dim() == 4 and self.q.shape[0] != 1:
                raise ValueError(f"q: expected batch 1 with cu_seqlens, got {self.q.shape[0]}")
            bounds = self.cu_seqlens.to(self.q.device, torch.long)
            self.starts, self.lengths = bounds[:-1], bounds.diff()
        if self.q.dim() == 4:
            self.q, self.k, self.v, self.g, self.beta = (
                x.flatten(0, 1) for x in (self.q, self.k, self.v, self.g, self.beta)
            )
        if self.HV % self.H:
            raise ValueError(f"v: heads must be a multiple of q's {self.H}, got {self.HV}")

    @property
    def H(self) -> int:
        return self.q.shape[1]

    @property
    def K(self) -> int:
        return self.q.shape[2]

    @property
    def HV(self) -> int:
        return self.v.shape[1]

    @property
    def V(self) -> int:
        return self.v.shape[2]

    @property
    def N(self) -> int:
        return self.lengths.shape[0]

    @property
    def activation(self) -> Activation:
        """What M1 applies, with A_log `[HV, 1]` and dt_bias `[HV, K]` to broadcast against `[..., HV, K]`."""
        return Activation(
            scale=self.K**-0.5 if self.scale is None else self.scale,
            use_qk_l2norm_in_kernel=self.use_qk_l2norm_in_kernel,
            use_gate_in_kernel=self.use_gate_in_kernel,
            use_beta_sigmoid_in_kernel=self.use_beta_sigmoid_in_kernel,
            allow_neg_eigval=self.allow_neg_eigval,
            A_log=None if self.A_log is None else self.A_log.reshape(self.HV, 1),
            dt_bias=None if self.dt_bias is None else self.dt_bias.reshape(self.HV, self.K),
            lower_bound=self.lower_bound,
        )

    def to_kv(self, state: Tensor) -> Tensor:
        """A state between the caller's layout and `[..., K, V]`; the map is its own inverse."""
        return state.transpose(-1, -2) if self.state_v_first else state
