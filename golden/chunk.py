"""The chunked form: the stages M1-M4 composed over sequences, heads and chunks in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .blocks import Block, Tables, block_inputs, blocks, chunk_tables, groups
from .call import Call
from .constants import CHUNK_SIZE
from .stages import AXES, stages
from .threads import for_each


def chunk_kda_golden(
    *args: Any, chunk_size: int = CHUNK_SIZE, dtype: torch.dtype = torch.float64, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Run `kda.chunk_kda`'s arguments (see `Call`) through M1-M4 in `dtype` (fp32 or fp64), any chunk size.

    Returns o (v's layout) and the final state (the caller's layout, None unless asked for), both in `dtype`. No
    argument is written: under `inplace_final_state` an updated copy of the pool comes back.
    """
    call = Call(*args, **kwargs)
    o = torch.zeros(call.v.shape, dtype=dtype, device=call.v.device)
    state = _run(call, chunk_size, dtype, lambda block, tensors: block.scatter(tensors["o"], o))
    wanted = call.output_final_state or call.inplace_final_state
    return o.reshape(call.o_shape), call.to_kv(call.final_states(state)).contiguous() if wanted else None


def chunk_kda_stages(
    *args: Any, chunk_size: int = CHUNK_SIZE, dtype: torch.dtype = torch.float64, **kwargs: Any
) -> dict[str, Tensor]:
    """Every tensor named in `STAGES` for the same call, as a table over all chunks in sequence order.

    `[NC, HV, C, ...]`, decay `[NC, HV, K]`, h `[NC, HV, K, V]`; NC sums ceil(length / C). Rows past a sequence's end
    are zero, except that G stays flat and Ainv has 1 on its diagonal. All in `dtype`, G in fp64.
    """
    call = Call(*args, **kwargs)
    tables, keep = chunk_tables(call, chunk_size, dtype, AXES)
    _run(call, chunk_size, dtype, keep)
    return tables


def _run(call: Call, C: int, dtype: torch.dtype, keep: Callable[[Block, Tables], None]) -> Tensor:
    """Take every chunk through the stages, hand each block to `keep`, return the final states `[N, HV, K, V]`."""
    state = call.start_states(dtype)

    def work(group: tuple[Tensor, slice]) -> None:
        ns, heads = group
        S = state[ns, heads]
        for block in blocks(call, C, ns, heads):
            x = block_inputs(call, block, dtype)
            tensors = stages(*x, call.activation.chunked(heads), S, block.valid)
            S = tensors["final_state"]
            keep(block, tensors)
        state[ns, heads] = S

    for_each(work, groups(call, C), state.device)
    return state
