"""FLA's operators as calls of ours: what each of FLA's arguments means for our operators is written once, here.

Each operator is the translation of its arguments into a `Translated` call, and the decorator runs that call. FLA's
dispatch asks the translation alone whether we can take a call.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import Tensor

import kda
from kda.backends.call import Op
from kda.golden.constants import CHUNK_SIZE

P = ParamSpec("P")


class Translated(NamedTuple):
    """A call of FLA's in our terms."""

    op: Op
    values: dict[str, Any]  # arguments of our operator
    o_dtype: torch.dtype  # that FLA returns o in
    h_shape: tuple[int, ...] = ()  # of the states before every chunk, where FLA returns them

    def run(self) -> tuple[Any, ...]:
        """o and the final state, as FLA returns them."""
        o, state = getattr(kda, self.op)(**self.values)
        if state is not None and not self.values.get("inplace_final_state"):
            state = state.float()
        h = self.values.get("chunk_states")
        return (o.to(self.o_dtype), state) if h is None else (o.to(self.o_dtype), state, h.view(self.h_shape))


def _operator(translate: Callable[P, Translated]) -> Callable[P, tuple[Any, ...]]:
    @functools.wraps(translate)
    def call(*args: P.args, **kwargs: P.kwargs) -> tuple[Any, ...]:
        return translate(*args, **kwargs).run()

    return call


@_operator
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    **others: Any,
) -> Translated:
    """`fla.ops.kda.chunk_kda` over `kda.chunk_kda`: FLA's names, order, defaults and layouts.

    What differs from `kda.chunk_kda`: states are `[N, HV, K, V]` unless `state_v_first`; q, k, v, g, beta, A_log and
    dt_bias may each have a float dtype of their own; without `use_gate_in_kernel`, `A_log`, `dt_bias` and `lower_bound`
    are ignored. `disable_recompute`, `cu_seqlens_cpu`, `chunk_size`, `use_graph` and `max_num_seqs` only tune FLA's
    kernels: they are taken and change nothing here, and so does any other keyword, as in FLA.

    Returns:
        `o` in q's dtype, and the final state in fp32, or None without `output_final_state`. With
        `return_intermediate_states` also the state before every chunk, `[B, NT, HV, K, V]` in q's dtype.

    Raises:
        ValueError: as FLA raises it (`chunk_size`, `safe_gate` without `lower_bound`, ...), and as `kda.chunk_kda`.
        NotImplementedError: `cp_context` is given.
    """
    if cp_context is not None:
        raise NotImplementedError("`cp_context`: expected to be left out, since kda-ops does not have it")
    if chunk_size not in (32, 64):
        raise ValueError(f"`chunk_size` must be either 32 or 64 for KDA, got {chunk_size}.")
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise ValueError("`lower_bound` must be specified when `safe_gate=True` and `use_gate_in_kernel=True`.")
    inputs = _inputs(q, k, v, g, beta, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    options = {
        "scale": scale, "initial_state": initial_state, "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval, "state_v_first": _state_v_first(state_v_first, others),
        "cu_seqlens": cu_seqlens,
    }  # fmt: skip
    if not return_intermediate_states:
        return Translated("chunk_kda", inputs | options, q.dtype)
    h = _intermediate_states(q, v, chunk_size, bool(options["state_v_first"]), cu_seqlens, cu_seqlens_cpu)
    values = inputs | options | {"chunk_states": h if cu_seqlens is None else h[0]}
    return Translated("chunk_kda", values, q.dtype, tuple(h.shape))


@_operator
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **others: Any,
) -> Translated:
    """`fla.ops.kda.fused_recurrent_kda` over `kda.fused_recurrent_kda`, with gradients, which FLA's has not.

    What differs from ours is as in `chunk_kda`; the initial state may have any float dtype, and o comes in v's.
    """
    _refuse_beta_per_channel(v, beta)
    inputs = _inputs(q, k, v, g, beta, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    options = {
        "scale": scale, "initial_state": _wide(initial_state, inputs["q"]), "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval, "state_v_first": _state_v_first(state_v_first, others),
        "cu_seqlens": cu_seqlens,
    }  # fmt: skip
    return Translated("fused_recurrent_kda", inputs | options, v.dtype)


def _intermediate_states(
    q: Tensor, v: Tensor, chunk_size: int, v_first: bool, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None
) -> Tensor:
    """Where the states before every chunk go, `[B, NT, HV, K, V]` in q's dtype; NT counts all chunks where B = 1 packs.

    Their number in a packed batch depends on the values of cu_seqlens, as it does in FLA.
    """
    if not torch.is_inference_mode_enabled():
        raise ValueError("return_intermediate_states is only allowed in inference mode")
    if chunk_size != CHUNK_SIZE:
        raise NotImplementedError(
            f"`chunk_size`: expected {CHUNK_SIZE} with return_intermediate_states, got {chunk_size}"
        )
    chunks = -(-q.shape[1] // CHUNK_SIZE)
    if cu_seqlens is not None:
        lengths = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).diff()
        chunks = int(((lengths + CHUNK_SIZE - 1) // CHUNK_SIZE).sum())
    rows, columns = (v.shape[-1], q.shape[-1]) if v_first else (q.shape[-1], v.shape[-1])
    return q.new_empty(q.shape[0], chunks, v.shape[2], rows, columns)


def _refuse_beta_per_channel(v: Tensor, beta: Tensor) -> None:
    if beta.dim() == v.dim():
        raise NotImplementedError(f"`beta`: expected [B, T, HV], got {list(beta.shape)}, a step size for every channel")


def _state_v_first(state_v_first: bool, others: dict[str, Any]) -> bool:
    if "transpose_state_layout" not in others:
        return state_v_first
    if state_v_first:
        raise ValueError("Cannot pass both `state_v_first` and the deprecated `transpose_state_layout`.")
    message = "`transpose_state_layout` is deprecated and renamed to `state_v_first`."
    warnings.warn(message, DeprecationWarning, stacklevel=4)
    return bool(others["transpose_state_layout"])


def _inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    use_gate_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
) -> dict[str, Any]:
    """The tensors in dtypes that our operators take, and the gate, of which FLA ignores what it doesn't use."""
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    inputs: dict[str, Any] = {"q": q, "k": k, "v": v, "use_gate_in_kernel": use_gate_in_kernel}
    inputs |= {name: x if x.dtype == dtype else x.float() for name, x in (("g", g), ("beta", beta))}
    if use_gate_in_kernel:
        inputs |= {"A_log": _wide(A_log, q), "dt_bias": _wide(dt_bias, q), "lower_bound": lower_bound}
    return inputs


def _wide(x: Tensor | None, q: Tensor) -> Tensor | None:
    """x in the dtype of computation beside q."""
    return None if x is None else x.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


@_operator
def fused_recurrent_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    out: Tensor | None = None,
    **others: Any,
) -> Translated:
    """`fla.ops.kda.fused_recurrent.fused_recurrent_kda_fwd`: FLA's decoding step, in place by default, no gradients.

    What differs from `kda.fused_recurrent_kda` is as in `fused_recurrent_kda`, and slot 0 of a pool is one like any
    other. Pools and states in place may be fp32, bf16 or fp16. Indices may have more rows than there are sequences.
    """
    _refuse_beta_per_channel(v, beta)
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    with torch.no_grad():
        inputs = {name: x.detach() if isinstance(x, Tensor) else x for name, x in _inputs(
            q, k, v, g, beta, use_gate_in_kernel, A_log, dt_bias, lower_bound).items()}  # fmt: skip
    options = {
        "scale": scale, "initial_state": initial_state, "output_final_state": output_final_state or inplace_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval, "state_v_first": _state_v_first(state_v_first, others),
        "cu_seqlens": cu_seqlens, "inplace_final_state": inplace_final_state, "null_slot": None, "out": out,
        "ssm_state_indices": None if ssm_state_indices is None else ssm_state_indices[:N],
        "num_accepted_tokens": None if num_accepted_tokens is None else num_accepted_tokens[:N],
    }  # fmt: skip
    return Translated("fused_recurrent_kda", inputs | options, v.dtype)
