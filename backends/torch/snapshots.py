"""States on the way through a call, into the tensors that its caller has for them."""

from __future__ import annotations

from torch import Tensor

from kda.backends.call import KdaCall
from kda.golden.constants import CHUNK_SIZE

from .layout import sequences


def write_snapshots(call: KdaCall, h: Tensor, final: Tensor) -> None:
    """From the states before every chunk, in the order of the sequences, and the final ones; the caller's layout.

    What is asked for at other places than a chunk's border, or behind a sequence's end, is not written.
    """
    if (chunks := call.chunk_states) is not None:
        if call.cu_seqlens is None:
            chunks.copy_(h.view(chunks.shape))
        else:
            rows = min(len(chunks), len(h))
            chunks[:rows].copy_(h[:rows])
    if call.checkpoint_offsets is None or call.checkpoint_states is None:
        return
    first = 0
    for n, (length, offset) in enumerate(zip(sequences(call)[1], call.checkpoint_offsets.tolist(), strict=True)):
        if offset % CHUNK_SIZE == 0 and 0 <= offset <= length:
            call.checkpoint_states[n].copy_(final[n] if offset == length else h[first + offset // CHUNK_SIZE])
        first += -(-length // CHUNK_SIZE)


def write_drafts(call: KdaCall, starts: list[int], lengths: list[int], states: Tensor) -> None:
    """From the states after every token of the flat batch, in the caller's layout, to `intermediate_states_buffer`."""
    buffer, indices = call.intermediate_states_buffer, call.intermediate_state_indices
    assert buffer is not None
    rows = range(call.N) if indices is None else indices.tolist()
    for row, start, length in zip(rows, starts, lengths, strict=True):
        kept = min(length, buffer.shape[1])
        if 0 <= row < len(buffer):
            buffer[row, :kept].copy_(states[start : start + kept])
