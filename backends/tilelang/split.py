"""A call whose sequences are cut into segments (segments.py), up to the states that enter these: carry starts there.

    [plan_segments, of packed calls ->] summary -> scan

What is launched follows from shapes, the number of multiprocessors and KDA_SPLIT alone, and where a packed call is cut
is decided on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda.backends.call import KdaCall
from kda.backends.environment import chunks_of_a_segment
from kda.golden.constants import CHUNK_SIZE

from .build import Kernel, build, processors, target_for
from .chunk_table import num_entries
from .segments import WHOLE, best_size, may_pay
from .tables import KERNELS, NARROW, Tables, block_V, heads

MOST_SEQUENCES = 4096
"""Of a packed call that is cut: ranking its segments costs N² reads."""


class Split(NamedTuple):
    """How a call's sequences are cut."""

    plan: Kernel | None  # of packed calls
    summary: Kernel
    scan: Kernel
    size: int  # chunks of a segment; 0: a packed call's, which the device chooses
    followed: int  # segments that others follow, or the most of them


def make_split(call: KdaCall, *, with_ainv: bool) -> Split | None:
    """The kernels, or None where the call's sequences stay whole."""
    size, followed = _cut(call)
    if not followed:
        return None
    target, packed = target_for(call.q.device), call.cu_seqlens is not None
    plan = None
    if packed:
        assert call.cu_seqlens is not None
        plan = build(
            target, f"{KERNELS}.plan_segments.plan_segments", HV=call.HV, tiles=_tiles(call),
            processors=processors(call.q.device), cu_dtype=call.cu_seqlens.dtype,
        )  # fmt: skip
    parameters = heads(call)
    summary = build(target, f"{KERNELS}.summary.summary", with_ainv=with_ainv, **parameters)
    del parameters["cu_dtype"]
    states = {"state_v_first": call.state_v_first, "has_initial_state": call.initial_state is not None}
    return Split(plan, summary, build(target, f"{KERNELS}.scan.scan", **states, **parameters), size, followed)


def run_split(call: KdaCall, split: Split, t: Tables, initial: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """The states that enter the segments, and how a kernel finds these: what a kernel that walks them is given."""
    device, segments = call.q.device, split.followed + call.N
    transition = t.table.new_empty(split.followed, call.HV, 2, call.K, call.K)
    offset = t.decay.new_empty(split.followed, call.HV, call.V, call.K)
    states = t.decay.new_empty(segments, call.HV, call.V, call.K)
    walks: tuple[Any, ...]
    runs: Any
    if split.plan is None:
        walks, runs = (call.T, split.size), split.followed // call.N + 1
    else:
        cu_seqlens = t.sequences[0]
        table = torch.empty(segments, 3, dtype=torch.int32, device=device)
        runs = torch.empty(call.N, 3, dtype=torch.int32, device=device)
        split.plan(cu_seqlens, split.size, table, runs)
        walks = cu_seqlens, table
    split.summary(t.table, t.decay, *walks, transition, offset)
    split.scan(transition, offset, *initial, runs, states)
    return (states, *walks)


def _cut(call: KdaCall) -> tuple[int, int]:
    """Chunks of a segment, or 0 where the device chooses, and the most segments that others follow."""
    asked, on = chunks_of_a_segment(), processors(call.q.device)
    chunks, packed = -(-call.T // CHUNK_SIZE), call.cu_seqlens is not None
    if asked == 0 or (packed and call.N > MOST_SEQUENCES):
        return WHOLE, 0
    if packed:
        if asked is not None:
            return asked, num_entries(call.T, call.N, varlen=True) // asked
        blocks = call.HV * _tiles(call)
        pays = block_V(call) == NARROW and may_pay(chunks, blocks, on)
        return 0, on // blocks if pays else 0
    size = best_size(chunks, call.N * call.HV * _tiles(call), on) if asked is None else asked
    return size, call.N * (-(-chunks // size) - 1)


def _tiles(call: KdaCall) -> int:
    """Blocks of a segment and value head, the most that one of the kernels has."""
    return max(call.K, call.V) // NARROW
