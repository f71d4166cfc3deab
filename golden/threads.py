"""Independent pieces of work side by side on the CPU, each with single-threaded operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")


def for_each(work: Callable[[Item], None], items: Iterable[Item], device: torch.device) -> None:
    """Call `work` on every item, on as many threads as torch has; elsewhere than on the CPU one after another.

    The golden is thousands of small operations. Split among threads, each of them would end at a barrier, and where
    others share the cores that takes twenty times as long; pieces with a thread of their own meet only at the end.
    """
    if device.type != "cpu":
        for item in items:
            work(item)
        return
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(work, items))
    finally:
        torch.set_num_threads(threads)
