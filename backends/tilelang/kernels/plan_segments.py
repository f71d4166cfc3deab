"""Where a packed call is cut into segments (segments.py), which the lengths decide, and in what order they are walked.

For each size that it may cut the sequences to, the kernel reckons the time. A multiprocessor runs one block at a time,
a block walks a segment, and long segments start first: so the time is that of a whole segment where every block has a
multiprocessor, and else of all chunks spread evenly, with the shortest segment at the end.
"""

from typing import Any

import tilelang.language as T

from kda.golden.constants import CHUNK_SIZE as C

from ..chunk_table import UNUSED
from ..segments import MOST_PIECES, WHOLE, cut_time, whole_time
from .segments import followed

_THREADS = 128


def chunks_of(n: Any, cu_seqlens: Any) -> Any:
    """Inside a kernel: chunks of sequence n of a packed call."""
    return T.ceildiv(T.cast(cu_seqlens[n + 1] - cu_seqlens[n], "int32"), C)


def plan_segments(*, HV: int, tiles: int, processors: int, cu_dtype: str) -> Any:
    """Kernel (cu_seqlens [N + 1], size, segments [S, 3], runs [N, 3]) for packed calls; the last two are outputs.

    segments becomes (sequence, first chunk, chunks) by rank, the unused ones behind (UNUSED, 0, 0); runs of each
    sequence (first rank, segments but the last one, rank of the last one). `size` is that of a segment in chunks; 0
    lets the kernel choose it, of no more than processors / (HV tiles) segments that others follow, or leave all whole.
    """
    N1, S = T.dynamic("N1, S")
    blocks = HV * tiles
    room = processors // blocks
    candidates = max(min(room, MOST_PIECES) - 1, 0)

    @T.prim_func
    def kda_plan_segments(
        cu_seqlens: T.Tensor((N1,), cu_dtype),
        size: T.int32,
        segments: T.Tensor((S, 3), "int32"),
        runs: T.Tensor((N1 - 1, 3), "int32"),
    ):
        N = N1 - 1
        with T.Kernel(N, threads=_THREADS) as n:
            weighed = T.if_then_else(size == 0, N, 0)
            longest = T.alloc_var("int32")
            total = T.alloc_var("int32")
            filled = T.alloc_var("int32")  # sequences that are not empty
            longest = 1
            total = 0
            filled = 0
            for m in T.serial(weighed):
                longest = T.max(longest, chunks_of(m, cu_seqlens))
                total = total + chunks_of(m, cu_seqlens)
                filled = filled + T.min(chunks_of(m, cu_seqlens), 1)

            # Thread t weighs t + 2 pieces of the longest sequence.
            piece = T.alloc_fragment((_THREADS,), "int32")
            ahead = T.alloc_fragment((_THREADS,), "int32")
            shortest = T.alloc_fragment((_THREADS,), "int32")
            time_s = T.alloc_shared((_THREADS,), "int64")
            for t in T.Parallel(_THREADS):
                piece[t] = T.ceildiv(longest, t + 2)
                ahead[t] = 0
                shortest[t] = longest
            for m in T.serial(weighed):
                for t in T.Parallel(_THREADS):
                    chunks = chunks_of(m, cu_seqlens)
                    ahead[t] = ahead[t] + followed(chunks, piece[t])
                    shortest[t] = T.min(
                        shortest[t],
                        T.if_then_else(chunks > 0, chunks - followed(chunks, piece[t]) * piece[t], shortest[t]),
                    )
            for t in T.Parallel(_THREADS):
                busy = (ahead[t] + filled) * blocks
                steps = T.if_then_else(
                    busy <= processors,
                    piece[t],
                    T.max(piece[t], T.ceildiv(T.cast(total, "int64") * blocks, processors)) + shortest[t],
                )
                time_s[t] = T.if_then_else(
                    ahead[t] <= room,
                    cut_time(T.cast(steps, "int64"), t + 2, T.min(busy, processors), T.max),
                    T.max_value("int64"),
                )
            least = T.alloc_var("int64")
            chosen = T.alloc_var("int32")
            least = whole_time(T.max(T.cast(longest, "int64"), T.ceildiv(T.cast(total, "int64") * blocks, processors)))
            chosen = T.if_then_else(size == 0, WHOLE, size)
            for t in T.serial(T.if_then_else(size == 0, T.min(candidates, longest - 1), 0)):
                if time_s[t] < least:
                    least = time_s[t]
                    chosen = T.ceildiv(longest, t + 2)

            # Ranks: of this sequence's segments that others follow behind those of the sequences before it, of its
            # last one behind the longer ones.
            own_ahead = T.alloc_var("int32")
            own_rest = T.alloc_var("int32")
            own_ahead = followed(chunks_of(n, cu_seqlens), chosen)
            own_rest = chunks_of(n, cu_seqlens) - own_ahead * chosen
            before = T.alloc_fragment((1, _THREADS), "int32")
            all_ahead = T.alloc_fragment((1, _THREADS), "int32")
            longer = T.alloc_fragment((1, _THREADS), "int32")
            total_before = T.alloc_fragment((1,), "int32")
            total_ahead = T.alloc_fragment((1,), "int32")
            total_longer = T.alloc_fragment((1,), "int32")
            T.clear(before)
            T.clear(all_ahead)
            T.clear(longer)
            for i in T.serial(T.ceildiv(N, _THREADS)):
                for t in T.Parallel(_THREADS):
                    m = T.min(i * _THREADS + t, N - 1)
                    inside = i * _THREADS + t < N
                    ahead_m = followed(chunks_of(m, cu_seqlens), chosen)
                    rest = chunks_of(m, cu_seqlens) - ahead_m * chosen
                    earlier = T.Or(rest > own_rest, T.And(rest == own_rest, m < n))
                    all_ahead[0, t] += T.if_then_else(inside, ahead_m, 0)
                    before[0, t] += T.if_then_else(T.And(inside, m < n), ahead_m, 0)
                    longer[0, t] += T.if_then_else(T.And(inside, earlier), 1, 0)
            T.reduce_sum(before, total_before, dim=1)
            T.reduce_sum(all_ahead, total_ahead, dim=1)
            T.reduce_sum(longer, total_longer, dim=1)
            first = T.alloc_var("int32")
            used = T.alloc_var("int32")
            last = T.alloc_var("int32")
            first = total_before[0]
            last = total_ahead[0] + total_longer[0]
            used = total_ahead[0] + N
            runs[n, 0] = first
            runs[n, 1] = own_ahead
            runs[n, 2] = last
            segments[last, 0] = n
            segments[last, 1] = own_ahead * chosen
            segments[last, 2] = own_rest
            for i in T.serial(T.ceildiv(own_ahead, _THREADS)):
                for t in T.Parallel(_THREADS):
                    if i * _THREADS + t < own_ahead:
                        segments[first + i * _THREADS + t, 0] = n
                        segments[first + i * _THREADS + t, 1] = (i * _THREADS + t) * chosen
                        segments[first + i * _THREADS + t, 2] = chosen
            for i in T.serial(T.if_then_else(n == 0, T.ceildiv(S - used, _THREADS), 0)):
                for t in T.Parallel(_THREADS):
                    if i * _THREADS + t < S - used:
                        segments[used + i * _THREADS + t, 0] = UNUSED
                        segments[used + i * _THREADS + t, 1] = 0
                        segments[used + i * _THREADS + t, 2] = 0

    return kda_plan_segments
