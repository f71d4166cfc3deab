"""The golden shares its work among threads, and no bit depends on how many."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from golden_calls import ragged

from kda.golden import chunk_kda_golden


def test_same_bits_for_any_number_of_threads_which_stays_as_it_was() -> None:
    threads = torch.get_num_threads()
    call = ragged(HV=8)
    o, state = chunk_kda_golden(**call)
    try:
        for other in (1, 2, 3):
            torch.set_num_threads(other)
            again = chunk_kda_golden(**call)
            with ThreadPoolExecutor(1) as later:
                assert torch.get_num_threads() == later.submit(torch.get_num_threads).result() == other
            assert torch.equal(o, again[0]) and torch.equal(state, again[1])
    finally:
        torch.set_num_threads(threads)
