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
    inplace_final_state: bool = False
    ssm_state_indices: Tensor | None = None  # [N]; in `RecurrentCall` also [N, S], one slot per drafted token
    has_initial_state: Tensor | None = field(default=None, kw_only=True)  # [N] bool; of chunk_kda alone
    null_slot: int | None = field(default=0, kw_only=True)
    checkpoint_offsets: Tensor | None = field(default=None, kw_only=True)  # for what the golden writes not

    starts: Tensor = field(init=False)  # [N] first token of each sequence
    lengths: Tensor = field(init=False)  # [N] tokens of each sequence; 0 for one that starts from no slot
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
        if self.initial_state is None and (self.ssm_state_indices is not None or self.inplace_final_state):
            raise ValueError("initial_state: expected with ssm_state_indices or inplace_final_state, got None")
        if (slots := self.start_slots()) is not None:
            self.lengths = self.lengths * (slots >= 0)

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

    def start_slots(self) -> Tensor | None:
        """Pool slot that each sequence starts from `[N]`, -1 for none; None where a call has no slots."""
        return self._slots()

    def start_states(self, dtype: torch.dtype) -> Tensor:
        """The state that each sequence starts from `[N, HV, K, V]`, a copy: zeros where it is none of the caller's."""
        S = torch.zeros(self.N, self.HV, self.K, self.V, dtype=dtype, device=self.v.device)
        if self.initial_state is None:
            return S
        slots = self.start_slots()
        rows = torch.arange(self.N, device=S.device) if slots is None else slots
        live = rows >= 0
        if self.has_initial_state is not None:
            live &= self.has_initial_state
        S[live] = self.to_kv(self.initial_state)[rows[live]].to(dtype)
        return S

    def final_states(self, S: Tensor) -> Tensor:
        """What the call returns of the states after each sequence's last token, `[N, HV, K, V]` both.

        In place, an updated copy of the caller's tensor: sequences without tokens write nothing.
        """
        if not self.inplace_final_state:
            return S
        assert self.initial_state is not None, "the constructor sees to it"
        pool = self.to_kv(self.initial_state).to(S.dtype).clone(memory_format=torch.contiguous_format)
        slots, ran = self.start_slots(), self.lengths > 0
        rows = torch.arange(self.N, device=S.device) if slots is None else slots
        pool[rows[ran]] = S[ran]
        return pool

    def _slots(self) -> Tensor | None:
        slots = self.ssm_state_indices
        if slots is None or self.initial_state is None:
            return None
        first = 0 if self.null_slot is None else 1
        return slots.long().where((slots >= first) & (slots < len(self.initial_state)), -1)

    def to_kv(self, state: Tensor) -> Tensor:
        """A state between the caller's layout and `[..., K, V]`; the map is its own inverse."""
        return state.transpose(-1, -2) if self.state_v_first else state
