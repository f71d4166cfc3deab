"""The normalised call: the one description of an operator call, from the front end to every backend.

`KdaCall` is also the one table of the operators' arguments. Its fields say each argument's kind and default, whether
autograd differentiates it and which operator has it, in the order of the operators' signatures; the schemas of the
torch operators, the checks and the calls are made from them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor

Op = Literal["chunk_kda", "fused_recurrent_kda"]
OPS: tuple[Op, ...] = ("chunk_kda", "fused_recurrent_kda")


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of computation and of the states beside q of `dtype`: fp32, or fp64 beside fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


_GRADIENT = {"differentiable": True}
_RECURRENT: dict[str, Any] = {"operators": ("fused_recurrent_kda",)}
_CHUNK: dict[str, Any] = {"operators": ("chunk_kda",), "keyword": True}
_KEYWORD = {"keyword": True}
_WRITTEN = {"keyword": True, "written": True}


@dataclass(slots=True, eq=False, kw_only=True)
class KdaCall:
    """One checked call of `chunk_kda` or `fused_recurrent_kda`.

    Tensors are always batched: a TND call of rank 3 arrives here as `[1, T, ...]`. Tensors may be non-contiguous.
    A backend treats the call as read-only, but for `initial_state` under `inplace_final_state`, and for the tensors
    that are there to be written (`out`, ...).
    """

    op: Op
    q: Tensor = field(metadata=_GRADIENT)  # [B, T, H, K]   bf16, fp16, fp32 or fp64; k and v alike
    k: Tensor = field(metadata=_GRADIENT)  # [B, T, H, K]
    v: Tensor = field(metadata=_GRADIENT)  # [B, T, HV, V]
    g: Tensor = field(metadata=_GRADIENT)  # [B, T, HV, K]  fp32 or q's dtype: log decay; raw with use_gate_in_kernel
    beta: Tensor = field(metadata=_GRADIENT)  # [B, T, HV]  likewise: step size; logits with use_beta_sigmoid_in_kernel
    scale: float = field(metadata={"default": None})
    # [N, HV, V, K], or a pool [slots, HV, V, K]; [.., K, V] unless state_v_first
    initial_state: Tensor | None = field(default=None, metadata=_GRADIENT)
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    A_log: Tensor | None = field(default=None, metadata=_GRADIENT)  # [HV]
    dt_bias: Tensor | None = field(default=None, metadata=_GRADIENT)  # [HV * K]
    lower_bound: float | None = None
    cu_seqlens: Tensor | None = None  # [N + 1] int32 or int64; B is then 1
    state_v_first: bool = True
    inplace_final_state: bool = False
    ssm_state_indices: Tensor | None = None  # [N] or [N, S] int32 or int64, slots of the pool `initial_state`
    num_accepted_tokens: Tensor | None = field(default=None, metadata=_RECURRENT)  # [N] int32 or int64, in 1..S
    has_initial_state: Tensor | None = field(default=None, metadata=_CHUNK)  # [N] bool: False starts from zeros
    null_slot: int | None = field(default=0, metadata=_KEYWORD)  # 0: slot 0 is none; None: it is one like any other
    out: Tensor | None = field(default=None, metadata=_WRITTEN)  # [B, T, HV, V] of v's dtype: o goes there
    checkpoint_offsets: Tensor | None = field(default=None, metadata=_CHUNK)  # [N] int32 or int64: tokens, or negative
    # [N, HV, V, K]: the state of sequence n after so many tokens
    checkpoint_states: Tensor | None = field(default=None, metadata=_CHUNK | _WRITTEN)
    # [rows, S, HV, V, K]: the state after each of a sequence's first S tokens, in its row
    intermediate_states_buffer: Tensor | None = field(default=None, metadata=_RECURRENT | _WRITTEN)
    # [N] int32 or int64: those rows; None: row n
    intermediate_state_indices: Tensor | None = field(default=None, metadata=_RECURRENT | _KEYWORD)
    # [B, chunks, HV, V, K], packed [chunks, ...]: the state before every chunk
    chunk_states: Tensor | None = field(default=None, metadata=_CHUNK | _WRITTEN)

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
    def final_dtype(self) -> torch.dtype:
        """Of the states that the call returns: the initial ones'."""
        return state_dtype(self.q.dtype) if self.initial_state is None else self.initial_state.dtype

    @property
    def dense_states(self) -> bool:
        """Whether the initial states are a row a sequence in the dtype of computation, all read and none written."""
        plain = self.ssm_state_indices is None and self.has_initial_state is None and not self.inplace_final_state
        return plain and self.final_dtype == state_dtype(self.q.dtype)

    @property
    def first_slot(self) -> int:
        """The lowest slot of a pool that holds a state."""
        return 0 if self.null_slot is None else self.null_slot + 1

    @property
    def recorded(self) -> bool:
        """Does autograd want to differentiate this call?"""
        if torch.is_grad_enabled():
            for x in _differentiable(self):
                if x is not None and x.requires_grad:
                    return True
        return False

    @property
    def state_per_token(self) -> bool:
        """Whether the state after every token has a slot or a row of its own, not only each sequence's last one."""
        return self.ssm_state_indices is not None and self.ssm_state_indices.dim() == 2


@dataclass(frozen=True)
class Argument:
    """A row of the table."""

    name: str
    kind: str  # in the schema of a torch operator: Tensor, Tensor?, bool, float? or int?
    default: Any  # of an optional one
    differentiable: bool
    keyword: bool  # given by name alone
    written: bool  # a tensor that is there to be written

    @property
    def optional(self) -> bool:
        """May a call do without it?"""
        return self.default is not dataclasses.MISSING


_KINDS = {"Tensor": "Tensor", "Tensor | None": "Tensor?", "bool": "bool", "float": "float?", "float | None": "float?",
          "int | None": "int?"}  # fmt: skip
_NO_ARGUMENTS = ("op", "memo")


def _table(op: Op) -> tuple[Argument, ...]:
    return tuple(
        Argument(
            f.name,
            _KINDS[str(f.type)],
            f.metadata.get("default", f.default),
            *(mark in f.metadata for mark in ("differentiable", "keyword", "written")),
        )
        for f in dataclasses.fields(KdaCall)
        if f.init and f.name not in _NO_ARGUMENTS and op in f.metadata.get("operators", OPS)
    )


ARGUMENTS: dict[Op, tuple[Argument, ...]] = {op: _table(op) for op in OPS}
"""The arguments of each operator, in the order of its signature."""

PER_TOKEN = tuple(argument.name for argument in ARGUMENTS["chunk_kda"] if not argument.optional)
"""The tensors with a row for every token: q, k, v, g and beta."""

WRITTEN = {op: tuple(argument.name for argument in ARGUMENTS[op] if argument.written) for op in OPS}
"""The tensors of each operator that are there to be written."""

DIFFERENTIABLE = tuple(argument.name for argument in ARGUMENTS["chunk_kda"] if argument.differentiable)
"""The tensors of a call that may require grad."""

_differentiable = attrgetter(*DIFFERENTIABLE)
