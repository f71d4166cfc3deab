"""Small good calls of the operators, from which the front end's tests depart."""

from __future__ import annotations

import torch

B, T, H, HV, K, V, SLOTS, S = 2, 3, 2, 4, 8, 4, 5, 3
PARAMETERS = {"use_gate_in_kernel": True, "A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV * K)}
CU = torch.tensor([0, 2, 2, 3])  # N = 3, with an empty sequence


def dense(**changes: object) -> dict[str, object]:
    """A good BSND call; `changes` replaces or adds arguments."""
    torch.manual_seed(0)
    call = {"q": torch.randn(B, T, H, K), "k": torch.randn(B, T, H, K), "v": torch.randn(B, T, HV, V),
            "g": -torch.rand(B, T, HV, K), "beta": torch.rand(B, T, HV)}  # fmt: skip
    return call | changes


def packed(**changes: object) -> dict[str, object]:
    """A good TND call of rank 3."""
    return {name: x[0] for name, x in dense().items()} | {"cu_seqlens": CU} | changes


def pool(**changes: object) -> dict[str, object]:
    """A good decoding call on a state pool, in place, with drafted tokens."""
    indices = torch.arange(1, 1 + B * S).view(B, S)
    return dense(initial_state=torch.randn(1 + B * S, HV, V, K), ssm_state_indices=indices,
                 num_accepted_tokens=torch.ones(B, dtype=torch.int32), inplace_final_state=True) | changes  # fmt: skip


def without(call: dict[str, object], *names: str) -> dict[str, object]:
    return {name: x for name, x in call.items() if name not in names}
