"""Registers of a Hopper kernel whose copies run in a warp group of their own, when several blocks share a
multiprocessor.

TileLang gives such a kernel 24 registers a producer thread and 240 a consumer thread: one block a multiprocessor. After
`share_registers` a block asks for its part of the register file alone, and no more than it was launched with: a warp
group that waits for registers which no one gives back waits for ever.
"""

import tilelang.language as T

_REGISTER_FILE = 65536
_PRODUCER_THREADS = 128
_PRODUCER_REGISTERS = 24


def _consumer_registers(threads: int, blocks_per_sm: int) -> int:
    all_threads = threads + _PRODUCER_THREADS
    at_launch = _REGISTER_FILE // (blocks_per_sm * all_threads) // 8 * 8
    return min(240, (at_launch * all_threads - _PRODUCER_REGISTERS * _PRODUCER_THREADS) // threads // 8 * 8)


@T.macro
def share_registers(threads: int, blocks_per_sm: int):
    """At the head of a kernel with `threads` consumer threads: let `blocks_per_sm` > 1 blocks fit by registers."""
    T.annotate_min_blocks_per_sm(blocks_per_sm)
    T.annotate_producer_reg_dealloc(_PRODUCER_REGISTERS)
    T.annotate_consumer_reg_alloc(_consumer_registers(threads, blocks_per_sm))
