"""The golden's chunked form equals the token recurrence: any gate, length, chunk size; its memory stays bounded."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_calls import LIMIT, RAGGED, alone, check, ragged

from kda.golden import chunk_kda_golden, inputs

GATES = ["logsigmoid", -1.5, -2.0, -5.0, "half_1000", 0.0, "mixed", -math.inf]


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_every_gate(gate: str | float, dtype: torch.dtype) -> None:
    check(inputs.stable(2, 150, 2, 64, V=32, HV=4, gate=gate, initial_state=True), dtype)


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("generator", [inputs.raw, inputs.collinear])
def test_other_inputs(generator: Any, dtype: torch.dtype) -> None:
    check(generator(1, 200, 2, 64, initial_state=True), dtype)


@pytest.mark.parametrize("chunk_size", [1, 2, 16, 64, 100, 128])
def test_any_chunk_size(chunk_size: int) -> None:
    check(ragged(), chunk_size=chunk_size)


@pytest.mark.parametrize("T", [0, 1, 15, 17, 63, 64, 65, 127, 129])
def test_tails(T: int) -> None:
    check(inputs.raw(1, T, 1, 16, initial_state=True))
    check(inputs.raw(1, T, 1, 16, initial_state=True), torch.float32, chunk_size=128)


@pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 5, 0, 65], [128, 0, 128], [200], []])
@pytest.mark.parametrize("initial_state", [False, True])
def test_lengths(lengths: list[int], initial_state: bool) -> None:
    call = inputs.raw(1, sum(lengths) + 3, 2, 16, lengths=lengths, initial_state=initial_state)
    check(call)
    state = chunk_kda_golden(**call)[1]
    assert state.shape == (len(lengths), 2, 16, 16)
    for n, length in enumerate(lengths):
        if not length:
            assert torch.equal(state[n], call["initial_state"][n].double() if initial_state else 0 * state[n])


def test_varlen_is_each_sequence_alone_and_one_segment_is_fixed_length() -> None:
    call = ragged()
    o, state = chunk_kda_golden(**call)
    start = 0
    for n, length in enumerate(RAGGED):
        own = alone(call, n, start, length)
        o_n, state_n = chunk_kda_golden(**own)
        assert torch.equal(o_n, o[:, start : start + length]) and torch.equal(state_n[0], state[n])
        one = own | {"cu_seqlens": torch.tensor([0, length])}
        assert torch.equal(chunk_kda_golden(**one)[0], o_n)
        start += length


def test_gva_is_repeated_heads_in_consecutive_runs() -> None:
    call = ragged()
    each = call | {name: call[name].repeat_interleave(2, 2) for name in ("q", "k")}
    assert torch.equal(chunk_kda_golden(**call)[0], chunk_kda_golden(**each)[0])


PEAK = """
import re, torch
from kda.golden import chunk_kda_golden, inputs
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
chunk_kda_golden(**inputs.stable(1, 64, 8, 64), dtype=torch.float64)
call = inputs.stable(1, {T}, 8, 64)
before = peak()
o, _ = chunk_kda_golden(**call, dtype=torch.float64)
print(peak() - before - o.numel() * o.element_size() / 2**20)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_memory_beyond_the_output_does_not_grow_with_length() -> None:
    """The decays of all chunks at once would be 1 GiB, the stages' tensors 0.25 GiB."""
    done = subprocess.run([sys.executable, "-c", PEAK.format(T=4096)], capture_output=True, text=True, check=True)
    assert float(re.search(r"\S+$", done.stdout.strip())[0]) < 150
