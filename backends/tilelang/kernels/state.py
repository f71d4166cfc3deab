"""The recurrent state: in memory fp32, [N, HV, V, K] or [N, HV, K, V]; in a kernel a fragment [columns of V, K]."""

from typing import Any

import tilelang.language as T


def state_tensor(N: Any, HV: int, K: int, V: int, state_v_first: bool) -> Any:
    """Type of a kernel argument that holds the states of N sequences."""
    return T.Tensor((N, HV, V, K) if state_v_first else (N, HV, K, V), "float32")


@T.macro
def load_state(memory: Any, n: Any, hv: Any, first_column: Any, state_v_first: bool, state: Any):
    for i, j in T.Parallel(*state.shape):
        if state_v_first:
            state[i, j] = memory[n, hv, first_column + i, j]
        else:
            state[i, j] = memory[n, hv, j, first_column + i]


@T.macro
def store_state(state: Any, memory: Any, n: Any, hv: Any, first_column: Any, state_v_first: bool):
    for i, j in T.Parallel(*state.shape):
        if state_v_first:
            memory[n, hv, first_column + i, j] = state[i, j]
        else:
            memory[n, hv, j, first_column + i] = state[i, j]
