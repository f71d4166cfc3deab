"""chunk_kda: whole sequences, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kda.backends.call import KdaCall
from kda.backends.pool import with_dense_states
from kda.golden.constants import CHUNK_SIZE

from .activation import Inputs, activate
from .carry import Carried, carry
from .inverse import inverse
from .layout import Layout, Piece, sequences
from .scores import scores
from .snapshots import write_snapshots
from .walk import initial_states, kv_layout, walk
from .wy import wy

CHUNKS_IN_CACHE, CHUNKS_ON_DEVICE = 64, 2048
"""Chunks times heads in work at once: on a CPU as many as its cache holds, elsewhere as many as fill a device."""


def chunk_kda(call: KdaCall) -> tuple[Tensor, Tensor | None]:
    """Run the call; o `[B, T, HV, V]` in v's dtype, and the final state as the ABI has it if the call asks for one."""
    return with_dense_states(call, _chunk_kda)


def _chunk_kda(call: KdaCall) -> tuple[Tensor, Tensor | None]:
    """From one state a sequence, in the dtype of computation.

    Sequences that are shorter than CHUNK_SIZE are given shorter chunks. Raises ValueError for wrong `cu_seqlens`.
    """

    def body(piece: Piece, x: Inputs, S: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        m4 = _carry(_prepare(call, piece, x), S)
        o = torch.stack(m4.o).unflatten(1, S.shape[:2])
        rows = {"o": piece.to_rows(o.to(call.v.dtype))}
        if snapshots:
            rows["h"] = torch.stack(m4.h).unflatten(1, S.shape[:2]).flatten(0, 1)
        return rows, m4.final_state.view_as(S)

    snapshots = call.checkpoint_offsets is not None or call.chunk_states is not None
    layout = _layout(call, lambda longest: min(CHUNK_SIZE, 1 << max(longest - 1, 0).bit_length()))
    results, final = walk(call, layout, initial_states(call), body)
    o = layout.by_token(results["o"]).view(call.v.shape) if results else call.v.new_zeros(call.v.shape)
    if snapshots:
        h = layout.by_chunk(results["h"]) if results else final[:0]
        write_snapshots(call, kv_layout(call, h), kv_layout(call, final))
    return o, kv_layout(call, final).contiguous() if call.output_final_state else None


def stages(call: KdaCall) -> dict[str, Tensor]:
    """Every tensor of M1 to M4, named and laid out as `golden.chunk_kda_stages`, in fp32 (fp64 for fp64 inputs)."""

    def body(piece: Piece, x: Inputs, S: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tables = _prepare(call, piece, x)
        m4 = _carry(tables, S)
        tables |= {"G": tables.pop("g").cumsum(-2), "h": torch.stack(m4.h), "v_new": torch.stack(m4.v_new)}
        by_sequence = {name: table.unflatten(1, S.shape[:2]) for name, table in tables.items()}
        return {name: table.flatten(0, 1) for name, table in by_sequence.items()}, m4.final_state.view_as(S)

    layout = _layout(call, lambda longest: CHUNK_SIZE)
    results, _ = walk(call, layout, initial_states(call), body)
    return {name: layout.by_chunk(rows) for name, rows in results.items()}


def _layout(call: KdaCall, chunk: Callable[[int], int]) -> Layout:
    tokens = CHUNK_SIZE * (CHUNKS_IN_CACHE if call.q.device.type == "cpu" else CHUNKS_ON_DEVICE)
    return Layout(call, *sequences(call), chunk=chunk, pairs=lambda C: tokens // C, tokens=tokens)


def _prepare(call: KdaCall, piece: Piece, x: Inputs) -> dict[str, Tensor]:
    """M1 to M3 on one piece: their tensors, and g for G, `[chunks, sequences * HV, C, ...]`."""
    q, k, v, g, beta = (t.flatten(0, 2) for t in activate(call, piece, x))
    m2 = scores(q, k, g)
    Akk = m2.Akk * beta
    Ainv = inverse(Akk)
    m3 = wy(q, k, v, beta, m2.from_start, m2.to_end, Ainv)
    tables = {"q": q, "k": k, "g": g, "beta": beta.squeeze(-1), "Akk": Akk, "Aqk": m2.Aqk, "Ainv": Ainv}
    tables |= m3._asdict()
    return {name: table.unflatten(0, (piece.chunks, -1)) for name, table in tables.items()}


def _carry(tables: dict[str, Tensor], S: Tensor) -> Carried:
    """M4 from the states `[sequences, HV, K, V]` that enter the piece."""
    Aqk, qg, kg, decay, w, u = (tables[name] for name in ("Aqk", "qg", "kg", "decay", "w", "u"))
    return carry(Aqk, qg, kg, decay, w, u, S.flatten(0, 1))
