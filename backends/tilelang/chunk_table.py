"""The chunk table: where a chunk's tensors live between the kernels.

An entry holds one chunk of CHUNK_SIZE tokens of one sequence. Sequence n with tokens [bos, eos) owns the entries

    base(n) + i,   0 <= i < ceil((eos - bos) / CHUNK_SIZE)
    base(n) = n * ceil(T / CHUNK_SIZE)               fixed length, [B, T, ...] read as [B * T, ...]
    base(n) = cu_seqlens[n] // CHUNK_SIZE + n        varlen

The varlen form needs no prefix sum over chunk counts: floor(b/C) - floor(a/C) + 1 >= ceil((b - a)/C), so sequences
never meet, at the price of at most one unused entry each. Nothing about the lengths has to reach the host:
`num_entries` follows from shapes alone, and the kernel `plan` tells each entry its sequence.

What prepare leaves for a chunk and value head stands side by side in one tensor [entries, HV, CHUNK_SIZE, width]:

    qg (K columns) | kg (K) | w (K) | u (V) | aqk (CHUNK_SIZE) [ | ainv (CHUNK_SIZE) ]

so that a call allocates and hands over one tensor instead of five; Ainv is there for the backward pass alone. Rows past
a sequence's end are zero, so a kernel that reads the table needs no masks; an unused entry is neither written nor read.
"""

from typing import NamedTuple

from torch import Tensor

from kda.golden.constants import CHUNK_SIZE

UNUSED = -1
"""`owner` of an entry that no sequence owns."""


class Columns(NamedTuple):
    """First column of each part of the table, and the width of all; qg's first column is 0."""

    kg: int
    w: int
    u: int
    aqk: int
    ainv: int
    width: int


def columns(K: int, V: int, *, with_ainv: bool) -> Columns:
    """Where the parts of a table for heads of K and V stand."""
    ainv = 3 * K + V + CHUNK_SIZE
    return Columns(K, 2 * K, 3 * K, 3 * K + V, ainv, ainv + (CHUNK_SIZE if with_ainv else 0))


def parts(table: Tensor, K: int, V: int) -> dict[str, Tensor]:
    """Views of the parts of a table with Ainv, by the golden's names."""
    widths = (K, K, K, V, CHUNK_SIZE, CHUNK_SIZE)
    return dict(zip(("qg", "kg", "w", "u", "Aqk", "Ainv"), table.split(widths, dim=-1), strict=True))


def num_entries(total_tokens: int, num_sequences: int, varlen: bool) -> int:
    """Entries of a call of B * T tokens in all and B (or len(cu_seqlens) - 1) sequences."""
    if varlen:
        return total_tokens // CHUNK_SIZE + num_sequences
    return num_sequences * -(-total_tokens // (max(num_sequences, 1) * CHUNK_SIZE))
