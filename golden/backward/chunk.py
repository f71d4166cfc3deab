"""The backward pass of whole calls: the stages dM4-dM1 composed over sequences, heads and chunks in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..blocks import Block, Tables, block_inputs, blocks, chunk_tables, groups, states
from ..call import Call
from ..constants import CHUNK_SIZE
from ..stages import stages
from ..threads import for_each
from .stages import BACKWARD_AXES, backward_stages

PER_TOKEN = ("q", "k", "v", "g", "beta")


def chunk_kda_backward_golden(
    do: Tensor, d_final_state: Tensor | None, *args: Any,
    chunk_size: int = CHUNK_SIZE, dtype: torch.dtype = torch.float64, **kwargs: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """The gradients of a call of `kda.chunk_kda` (see `Call`), from those of o and of the final state (None: zeros).

    do has v's shape, and d_final_state the caller's state layout. Returns the gradients of q, k, v, g and beta, and of
    initial_state, A_log and dt_bias where the call has and uses them: each under the argument's name, in the argument's
    shape and in `dtype`. Tokens of no sequence get gradients of 0, whatever do is there.
    """
    call = Call(*args, **kwargs)
    of_gate = {name: its for name, its in _axes(call).items() if name in ("dA_log", "ddt_bias")}
    sums, keep_sums = chunk_tables(call, chunk_size, dtype, of_gate)
    sizes = {"v": (call.V,), "beta": ()}
    heads = {
        name: torch.zeros(len(call.v), call.HV, *sizes.get(name, (call.K,)), dtype=dtype, device=call.v.device)
        for name in PER_TOKEN
    }

    def keep(block: Block, tensors: Tables) -> None:
        keep_sums(block, tensors)
        for name, gradient in heads.items():
            block.scatter(tensors[f"d{name}"], gradient)

    d_initial_state = _run(call, do, d_final_state, chunk_size, dtype, keep)
    gradients = {}
    for name, gradient in heads.items():
        shape = getattr(call, name).shape[1:]
        gradients[name] = gradient.unflatten(1, (shape[0], -1)).sum(2).reshape(*call.o_shape[:-2], *shape)
    if call.initial_state is not None:
        gradients["initial_state"] = call.to_kv(d_initial_state).contiguous()
    for name, table in sums.items():
        argument = name.removeprefix("d")
        gradients[argument] = table.sum(0).reshape(getattr(call, argument).shape)
    return gradients


def chunk_kda_backward_stages(
    do: Tensor, d_final_state: Tensor | None, *args: Any,
    chunk_size: int = CHUNK_SIZE, dtype: torch.dtype = torch.float64, **kwargs: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Every tensor named in `BACKWARD_STAGES` for the same call, as a table over all chunks in sequence order.

    `[NC, HV, C, ...]`, ddecay and ddt_bias `[NC, HV, K]`, dh `[NC, HV, K, V]`, dA_log `[NC, HV]`; all in `dtype`. Rows
    past a sequence's end are zero, except for dg_activated. dA_log and ddt_bias are there if the gate has them.
    """
    call = Call(*args, **kwargs)
    tables, keep = chunk_tables(call, chunk_size, dtype, _axes(call))
    _run(call, do, d_final_state, chunk_size, dtype, keep)
    return tables


def _axes(call: Call) -> dict[str, str]:
    """`BACKWARD_AXES`, but for the gate's parameters that the call does not have or use."""
    unused = {f"d{name}" for name in ("A_log", "dt_bias") if getattr(call, name) is None or not call.use_gate_in_kernel}
    return {name: its for name, its in BACKWARD_AXES.items() if name not in unused}


def _run(
    call: Call, do: Tensor, d_final_state: Tensor | None, C: int, dtype: torch.dtype,
    keep: Callable[[Block, Tables], None],
) -> Tensor:  # fmt: skip
    """Take every chunk through the stages, hand each block to `keep`, return the initial states' gradients.

    The forward goes through a group's blocks first and leaves the state before each of them; the backward then has the
    forward's tensors of one block at a time.
    """
    if do.shape != call.o_shape:
        raise ValueError(f"do: expected v's shape {list(call.o_shape)}, got {list(do.shape)}")
    do = do.detach().reshape(call.v.shape)
    state, d_state = states(call, call.initial_state, dtype), states(call, d_final_state, dtype)

    def work(group: tuple[Tensor, slice]) -> None:
        ns, heads = group
        act = call.activation.chunked(heads)
        S, dS = state[ns, heads], d_state[ns, heads]
        entered = []
        for block in blocks(call, C, ns, heads):
            entered.append((block, S))
            S = stages(*block_inputs(call, block, dtype), act, S, block.valid)["final_state"]
        for block, S in reversed(entered):
            inputs = block_inputs(call, block, dtype)
            forward = stages(*inputs, act, S, block.valid)
            do_block = block.gather(do, call.HV, dtype)
            tensors = backward_stages(*inputs, act, block.valid, forward, do_block, dS)
            dS = tensors["d_initial_state"]
            keep(block, tensors)
        d_state[ns, heads] = dS

    for_each(work, groups(call, C), state.device)
    return d_state
