"""The two operators that a user calls. Everything they accept is checked in `kda.checks`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from kda import backends, library
from kda.backends.call import DIFFERENTIABLE, Op
from kda.checks import checked


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
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = True,
    inplace_final_state: bool = False,
    ssm_state_indices: Tensor | None = None,
    *,
    has_initial_state: Tensor | None = None,
    null_slot: int | None = 0,
    out: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_states: Tensor | None = None,
    chunk_states: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention over whole sequences, chunk by chunk (arXiv:2510.26692).

    Per value head, with the state S of shape [K, V]:
    S ← diag(exp g_t) S;  S ← S + β_t k_t (v_t − k_tᵀ S)ᵀ;  o_t = scale · q_tᵀ S.

    Args:
        q, k: `[B, T, H, K]`; with `cu_seqlens` packed, `[T, H, K]` or `[1, T, H, K]`. bf16, fp16, fp32 or fp64
            as far as the backend takes them; q, k and v share one dtype.
        v: `[B, T, HV, V]` (or `[T, HV, V]`). HV is a multiple of H; value head i reads q and k of head i // (HV // H).
        g: `[B, T, HV, K]`, fp32 or q's dtype: log decay per token, natural logarithm, in [-inf, 0]; the raw gate with
            `use_gate_in_kernel`.
        beta: `[B, T, HV]`, fp32 or q's dtype: step size; its logits with `use_beta_sigmoid_in_kernel`.
        scale: factor on q; `K ** -0.5` if None.
        initial_state: fp32 (fp64 beside fp64 inputs), bf16 or fp16 `[N, HV, V, K]` (`[N, HV, K, V]` with
            `state_v_first=False`), N = B or the number of sequences in `cu_seqlens`; zeros if None. Whatever its
            dtype, the state is carried in fp32 (fp64) and rounded once, when it is stored.
        output_final_state: also return the state after each sequence's last token.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares over K + 1e-6), before the scale.
        use_gate_in_kernel: decay = `-exp(A_log) * softplus(g + dt_bias)`, or, with `lower_bound`,
            `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`.
        use_beta_sigmoid_in_kernel: step size = `sigmoid(beta)`, `2 * sigmoid(beta)` with `allow_neg_eigval`.
        A_log: fp32 (or fp64 beside fp64 inputs), HV elements in any shape; may be None (factor 1) where
            `lower_bound` is set.
        dt_bias: dtypes as `A_log`, HV·K elements in any shape, or None.
        lower_bound: in [-5, 0).
        cu_seqlens: int32 or int64 `[N + 1]` on the tensors' device: never decreases; equal neighbours are empty
            sequences, and tokens before its first value and from its last one on are padding, for which `o` is 0.
        state_v_first: layout of `initial_state` and of the returned state.
        inplace_final_state: write the final states into `initial_state` itself, which is then what is returned. Not
            while autograd records: under `torch.no_grad()`, or with no tensor that requires grad.
        ssm_state_indices: int32 or int64 `[N]`: `initial_state` is a pool `[slots, HV, V, K]`, and sequence n starts
            from slot `ssm_state_indices[n]`; its last state goes back there (in place) or to row n of a new
            `[N, HV, V, K]`. Slot 0 is the null slot, as are negative indices and those past the pool: a sequence that
            starts there gives o = 0, and nothing is read or written for it.
        has_initial_state: bool `[N]`: where it is False, the sequence starts from zeros whatever its slot or row holds.
        null_slot: 0 as above, or None: slot 0 is one like any other, and only indices that name no slot are null.
        out: as v: o is written there, and `out` itself is returned. Not while autograd records.
        checkpoint_offsets: int32 or int64 `[N]`: the state of sequence n after its first `checkpoint_offsets[n]` tokens
            is written to row n of `checkpoint_states`. A multiple of 64, at most the sequence's length; -1 for none.
        checkpoint_states: `[N, HV, V, K]`, any float dtype.
        chunk_states: any float dtype, `[B, ceil(T / 64), HV, V, K]`, or packed `[chunks, HV, V, K]`: the state before
            every chunk of 64 tokens is written there, those of a sequence in a row, one sequence after the other.
        backend: "auto", "tilelang", "pypto" or "torch"; None reads the environment's KDA_BACKEND, default "auto".

    Returns:
        `o` in the layout and dtype of v, and the final state (dtype and layout as `initial_state`'s) or None.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, what was expected and what came.
        NotImplementedError: an explicitly named backend cannot take the call, with every reason.
    """
    return _run("chunk_kda", {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, "scale": scale, "initial_state": initial_state,
        "output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": use_gate_in_kernel, "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound,
        "cu_seqlens": cu_seqlens, "state_v_first": state_v_first, "inplace_final_state": inplace_final_state,
        "ssm_state_indices": ssm_state_indices, "has_initial_state": has_initial_state, "null_slot": null_slot,
        "out": out, "checkpoint_offsets": checkpoint_offsets, "checkpoint_states": checkpoint_states,
        "chunk_states": chunk_states, "backend": backend,
    })  # fmt: skip


def fused_recurrent_kda(
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
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = True,
    inplace_final_state: bool = False,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    *,
    null_slot: int | None = 0,
    out: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention token by token: decoding, one or a few tokens per sequence and call.

    The recurrence and the arguments are those of `chunk_kda`; besides:

    Args:
        ssm_state_indices: int32 or int64. `[N]`: `initial_state` is a pool `[slots, HV, V, K]`, and sequence n starts
            from slot `ssm_state_indices[n]`; its last state goes back there (in place) or to row n of a new
            `[N, HV, V, K]`. `[N, S]`, for speculative decoding with at most S drafted tokens per sequence: the state
            after token t goes to slot `ssm_state_indices[n, t]` (in place), or to the token's row of a new
            `[B·T, HV, V, K]`. Slot 0 is the null slot, as are negative indices and those past the pool: a sequence that
            starts there gives o = 0, and nothing is read or written for it.
        num_accepted_tokens: int32 or int64 `[N]`, each in 1..S, with `[N, S]` indices: sequence n starts from slot
            `ssm_state_indices[n, num_accepted_tokens[n] - 1]`, the state after its last accepted token.
        intermediate_states_buffer: `[rows, S, HV, V, K]`, any float dtype, not beside `[N, S]` indices: the state
            after token t of sequence n is written to `[r, t]` of it, with r = `intermediate_state_indices[n]`, or n.
            For drafts whose pool must not change before it is known which are accepted.
        intermediate_state_indices: int32 or int64 `[N]`. A row out of range, and what comes after S tokens, is dropped.

    Returns:
        `o` in the layout and dtype of v, and, with `output_final_state`, the states as above; else None.

    Raises:
        As `chunk_kda`.
    """
    return _run("fused_recurrent_kda", {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, "scale": scale, "initial_state": initial_state,
        "output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": use_gate_in_kernel, "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound,
        "cu_seqlens": cu_seqlens, "state_v_first": state_v_first,
        "inplace_final_state": inplace_final_state, "ssm_state_indices": ssm_state_indices,
        "num_accepted_tokens": num_accepted_tokens, "null_slot": null_slot, "out": out,
        "intermediate_states_buffer": intermediate_states_buffer,
        "intermediate_state_indices": intermediate_state_indices, "backend": backend,
    })  # fmt: skip


def _run(op: Op, values: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Check the call once, choose its backend once, run it. `values` has every argument, `backend` too."""
    if torch.compiler.is_compiling() or isinstance(values["q"], FakeTensor):
        return library.traced(op, values)
    backend = values.pop("backend")
    call = checked(op, **values)
    chosen = backends.select(call, backend)
    if call.q.is_meta and chosen == "torch":
        return library.traced(op, values | {"backend": backend})
    differentiable = backends.load(chosen).differentiable
    if torch._C._are_functorch_transforms_active() and not differentiable:
        raise NotImplementedError(f"backend {chosen!r} cannot take this {op} call: the transforms of torch.func go "
                                  "through the backend torch alone")  # fmt: skip
    if not differentiable and call.recorded:
        o, states = library.Recorded.apply(call, chosen, *(getattr(call, name) for name in DIFFERENTIABLE))
    else:
        o, states = backends.run(chosen, call)
    if values["out"] is not None:
        return values["out"], states
    return (o[0] if values["v"].dim() == 3 else o), states
