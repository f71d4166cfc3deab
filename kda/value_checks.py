"""Checks that need values (`KDA_CHECK=1`): they copy from the device and wait for it, so they are for debugging."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from kda.backends.call import KdaCall
from kda.golden.constants import CHUNK_SIZE

_BY_SEQUENCE = ("ssm_state_indices", "num_accepted_tokens", "checkpoint_offsets")


def check_values(call: KdaCall) -> None:
    """Raise ValueError for the first argument whose values break the ABI, with the place of the offence.

    What no operator reads may hold anything: padding behind `cu_seqlens[-1]`, the tokens of null sequences, slots of
    the pool that no sequence starts from.
    """
    bounds = _sequence_bounds(call)
    live = list(range(call.N))
    if (indices := call.ssm_state_indices) is not None and (pool := call.initial_state) is not None:
        start = _start_slots(pool, indices, call.num_accepted_tokens)
        live = [n for n in live if start[n] >= call.first_slot]
        _check_pool(call, pool, indices, bounds, start, live)
    elif call.has_initial_state is None:
        _require("initial_state", call.initial_state, torch.isfinite, "finite values")
    else:
        fresh = ~call.has_initial_state.view(-1, 1, 1, 1)
        _require("initial_state", call.initial_state, lambda x: x.isfinite() | fresh, "finite values")
    read = torch.zeros(call.B, call.T, dtype=torch.bool)
    for n in live:
        read[0 if call.cu_seqlens is not None else n, slice(*bounds[n])] = True
    read = read.to(call.q.device)
    for name in ("q", "k", "v", "beta"):
        _require(name, getattr(call, name), torch.isfinite, "finite values", read)
    if call.use_gate_in_kernel:
        _require("g", call.g, torch.isfinite, "finite values (raw gate)", read)
    else:
        _require("g", call.g, lambda g: g <= 0, "log decays in [-inf, 0]", read)
    if (offsets := call.checkpoint_offsets) is not None:
        ends = torch.tensor([end - begin for begin, end in bounds], device=offsets.device)
        _require("checkpoint_offsets", offsets, lambda x: (x < 0) | (x % CHUNK_SIZE == 0) & (x <= ends),
                 f"multiples of {CHUNK_SIZE} within the sequence, or -1")  # fmt: skip
    for name in ("A_log", "dt_bias"):
        _require(name, getattr(call, name), torch.isfinite, "finite values")


def _require(name: str, x: Tensor | None, holds: Callable[[Tensor], Tensor], expected: str,
             read: Tensor | None = None) -> None:  # fmt: skip
    """`holds` for every element of x, or for those of the tokens where `read` [B, T] is true."""
    if x is None:
        return
    bad = ~holds(x)
    if read is not None:
        bad &= read.view(*read.shape, *[1] * (x.dim() - 2))
    if bad.any():
        where = bad.nonzero()[0].tolist()
        of = f" (sequence {where[0]})" if name in _BY_SEQUENCE else ""
        raise ValueError(f"{name}: expected {expected}, got {x[tuple(where)].item()} at {where}{of}")


def _sequence_bounds(call: KdaCall) -> list[tuple[int, int]]:
    """First token and end of each sequence, along the token axis."""
    if call.cu_seqlens is None:
        return [(0, call.T)] * call.N
    cu = call.cu_seqlens.tolist()
    falls = [i for i in range(1, len(cu)) if cu[i] < cu[i - 1]]
    if cu[0] < 0 or falls or cu[-1] > call.T:
        where = f" (falls at index {falls[0]})" if falls else ""
        expected = f"0 or more first, no decrease, and at most T = {call.T} last"
        raise ValueError(f"cu_seqlens: expected {expected}, got {cu}{where}")
    return list(itertools.pairwise(cu))


def _start_slots(pool: Tensor, indices: Tensor, accepted: Tensor | None) -> list[int]:
    """The slot that each sequence starts from."""
    slots = pool.shape[0]
    _require("ssm_state_indices", indices, lambda i: i < slots, f"slots below {slots}")
    if indices.dim() == 1:
        return indices.tolist()
    if accepted is None:
        return indices[:, 0].tolist()
    S = indices.shape[1]
    _require("num_accepted_tokens", accepted, lambda a: (a >= 1) & (a <= S), f"values in 1..{S}")
    return indices.gather(1, accepted.long()[:, None] - 1)[:, 0].tolist()


def _check_pool(
    call: KdaCall, pool: Tensor, indices: Tensor, bounds: list[tuple[int, int]], start: list[int], live: list[int]
) -> None:
    has = [True] * call.N if call.has_initial_state is None else call.has_initial_state.tolist()
    for slot in (start[n] for n in live if has[n]):
        _require(f"initial_state[{slot}]", pool[slot], torch.isfinite, "finite values")
    slots = indices.tolist()
    lengths = [end - begin for begin, end in bounds]
    if indices.dim() == 1:
        slots, lengths = [[slot] for slot in slots], [min(length, 1) for length in lengths]
    elif (longest := max(lengths, default=0)) > (S := indices.shape[1]):
        raise ValueError(f"ssm_state_indices: expected S >= the longest sequence {longest}, got S = {S}")
    if call.inplace_final_state:
        first = call.first_slot
        _check_written({n: [slot for slot in slots[n][: lengths[n]] if slot >= first] for n in live}, start)


def _check_written(written: dict[int, list[int]], start: list[int]) -> None:
    """No slot is written twice, nor by another sequence than the one that starts from it."""
    writer: dict[int, int] = {}
    for n, slots in written.items():
        for slot in slots:
            if slot in writer:
                raise ValueError("ssm_state_indices: expected distinct slots with inplace_final_state, got slot "
                                 f"{slot} for sequences {writer[slot]} and {n}")  # fmt: skip
            writer[slot] = n
    for n in written:
        if (other := writer.get(start[n], n)) != n:
            raise ValueError("ssm_state_indices: expected start slots that no other sequence writes, got slot "
                             f"{start[n]}, where sequence {n} starts and sequence {other} writes")  # fmt: skip
