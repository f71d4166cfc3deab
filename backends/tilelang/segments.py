"""Segments: where sequences are cut, so that few heads occupy a whole GPU.

A segment is `size` chunks of one sequence; a sequence's last one may be shorter, and an empty sequence has one of no
chunks. Over a segment the state goes

    S_out = M S_in + B        M [K, K], B [K, V]

and M and B follow from its own chunks. So all segments that others follow are summed up side by side
(kernels/summary.py), a scan over each sequence's summaries gives the states that enter its segments (kernels/scan.py),
and the carry (kernels/carry.py) walks all segments side by side.

Segments are ranked: first those that others follow, F of them, by sequence and place; then the last one of each
sequence. So M and B have F rows, and the states F + N.

    fixed length    every sequence is cut alike, which shapes tell: F = N (pieces - 1), the last ones as they come
    packed          the device chooses `size` and ranks the segments (kernels/plan_segments.py), the last ones by their
                    length; the host knows the most that F can be

Where to cut is a matter of time, so here is what things take. The kernels' plan for packed calls reckons by it as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Nanoseconds, measured on an H200 with K = V = 128. A chunk: in the carry over whole sequences; in the summary and the
# carry over segments together, where a block's own work binds; there for each block at work, where the memory binds.
# Then a step of the scan, and what the kernels cost that are launched in addition.
_WHOLE_CHUNK, _CUT_CHUNK, _SHARED_CHUNK, _SCAN_STEP, _LAUNCHES = 1030, 1770, 17, 1700, 10_000

_GAIN = 10_000
"""What cutting has to gain."""

_PACKED_GAIN = 100_000
"""What it has to gain, if one sequence has all tokens, for a packed call's segments to be planned at all: where the
device finds that the lengths are better left whole, the kernels launched for nothing cost a tenth of it."""

WHOLE = 2**30
"""`size` where sequences stay whole."""

MOST_PIECES = 129
"""Of a sequence: the kernel that plans a packed call weighs 2 to so many, a thread each."""


def whole_time(chunks: Any) -> Any:
    """Of the carry over sequences, the longest of so many chunks."""
    return chunks * _WHOLE_CHUNK


def cut_time(chunks: Any, pieces: Any, blocks: Any, largest: Callable[[Any, Any], Any] = max) -> Any:
    """Of summary, scan and carry: a multiprocessor walks so many chunks, a scan takes `pieces` steps, and so many
    blocks are at work at a time. Kernels have a `largest` of their own."""
    return chunks * largest(_CUT_CHUNK, blocks * _SHARED_CHUNK) + pieces * _SCAN_STEP + _LAUNCHES + _GAIN


def best_size(chunks: int, blocks: int, processors: int, least_gain: int = 0) -> int:
    """Chunks of a segment of sequences of so many chunks, over which so many blocks walk while they are whole.

    WHOLE where cutting them gains less than _GAIN, or than `least_gain` beside it.
    """
    best, least = WHOLE, whole_time(chunks) - least_gain
    for pieces in range(2, min(processors // blocks, chunks, MOST_PIECES) + 1):
        size = -(-chunks // pieces)
        if (time := cut_time(size, pieces, blocks * pieces)) < least:
            best, least = size, time
    return best


def may_pay(chunks: int, blocks: int, processors: int) -> bool:
    """Whether a packed call's segments are planned: `blocks` walk one sequence, and all have so many chunks."""
    return best_size(chunks, blocks, processors, _PACKED_GAIN) != WHOLE
