"""The backend that runs anywhere: plain PyTorch, with autograd. It takes every call that the front end lets through."""

from __future__ import annotations

from kda.backends.call import KdaCall

from .activation import gate
from .chunk import chunk_kda, stages
from .recurrent import fused_recurrent_kda

__all__ = [
    "about", "chunk_kda", "differentiable", "fused_recurrent_kda", "gate", "refuses", "stages", "takes", "unusable",
]  # fmt: skip

about = "plain PyTorch on any device, with autograd"
differentiable = True
takes = frozenset((
    "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "A_log", "dt_bias", "lower_bound", "cu_seqlens", "state_v_first",
    "inplace_final_state", "ssm_state_indices", "num_accepted_tokens", "has_initial_state", "null_slot",
    "checkpoint_offsets", "checkpoint_states", "chunk_states",
    "intermediate_states_buffer", "intermediate_state_indices",
))  # fmt: skip


def unusable() -> list[str]:
    """Why the backend cannot run on this machine: never."""
    return []


def refuses(call: KdaCall) -> list[str]:
    """Why it cannot take the call: it takes every one."""
    return []
