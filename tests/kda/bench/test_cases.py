"""The benchmark's cases: their bytes and operations against hand counts and real tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kda
from kda.bench.cases import CASES, FEW_HEADS, HOST_CASE, MIXED, PEER_CASES, TRAINING, Batch, Case, Decode, Train

pytestmark = pytest.mark.usefixtures("one_thread", "plain_environment")


def test_the_table_of_cases() -> None:
    assert [CASES[id].H for id in ("H96", "H64", "H32", "H16")] == [96, 64, 32, 16]
    assert sum(MIXED) == 8192 and CASES["H64-mixed"].lengths == MIXED and CASES["H96-8x1024"].tokens == 8192
    assert {CASES[f"T{T}"].lengths[0] for T in (64, 128, 256, 512, 1024, 2048)} == {64, 128, 256, 512, 1024, 2048}
    assert set(PEER_CASES) <= set(CASES) and CASES[HOST_CASE].tokens == 64
    training = [(CASES[id].H, CASES[id].lengths) for id in TRAINING]
    assert training == [(H, (T,)) for T in (8192, 32768) for H in (96, 64, 32, 16)] + [(32, MIXED)]
    few = {(CASES[id].H, CASES[id].lengths, CASES[id].packed) for id in FEW_HEADS}
    assert {(H, (T,), False) for H in (4, 8, 16) for T in (8192, 32768, 65536, 131072)} <= few
    assert {(8, (8192,) * B, False) for B in (2, 4, 8)} | {(8, (8192,) * 8, True)} <= few


def test_bytes_by_hand() -> None:
    # A token and head: five rows of 128 and one beta, 641 numbers of 2 bytes.
    # A head: states 2 · 128² · 4 B, A_log and dt_bias 129 · 4 B.
    assert CASES["T64"].moved_bytes == 32 * (64 * 1282 + 131072 + 516) == 6836352
    assert CASES["H96"].moved_bytes == 96 * (8192 * 1282 + 131072 + 516) == 1020838272
    assert CASES["H96-8x1024"].moved_bytes == CASES["H96"].moved_bytes + 7 * 96 * 131072 + 9 * 8


@pytest.mark.parametrize(
    "case",
    [
        Case("one", 3, (70,)),
        Case("packed", 2, (5, 64, 7)),
        Batch("batch", 2, (9, 9)),
        Case("K", 2, (9,), 64, 32),
        Decode("B", 2, (4, 4, 4)),
    ],
)
def test_bytes_are_those_of_the_tensors(case: Case) -> None:
    inputs = case.inputs(torch.device("cpu"), torch.bfloat16)
    results = getattr(kda, case.operator)(**inputs)
    tensors = [x for x in (*inputs.values(), *results) if isinstance(x, Tensor)]
    assert case.moved_bytes == sum(x.nbytes for x in tensors)
    again = case.inputs(torch.device("cpu"), torch.bfloat16)
    assert all(torch.equal(inputs[name], again[name]) for name in ("q", "g", "initial_state", "A_log"))


@pytest.mark.parametrize("case", [Train("one", 3, (70,)), Train("packed", 2, (5, 64, 7)), Train("K", 2, (9,), 64, 32)])
def test_bytes_of_training_are_those_of_the_tensors(case: Train) -> None:
    """Inputs are read in both passes, o and its gradient once each, and each gradient is written."""
    inputs = case.inputs(torch.device("cpu"), torch.bfloat16)
    o, state = kda.chunk_kda(**inputs)
    leaves = [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]
    gradients = torch.autograd.grad(o.sum(), leaves)
    assert state is None and len(leaves) == 7
    read = sum(x.nbytes for x in inputs.values() if isinstance(x, Tensor))
    assert case.moved_bytes == 2 * read + 2 * o.nbytes + sum(x.nbytes for x in gradients)


def test_flops_by_hand() -> None:
    # A whole chunk: Akk, Aqk, w 3 · 2 · 64² · 128; u, Aqk v_new 2 · 2 · 64² · 128; three products of 2 · 64 · 128².
    chunk = 5 * 2 * 64 * 64 * 128 + 3 * 2 * 64 * 128 * 128 + 64**3 / 3
    assert CASES["T64"].flops == pytest.approx(32 * chunk)
    assert CASES["H96"].flops == pytest.approx(96 * 128 * chunk)
    assert CASES["B16x4"].flops == 16 * 4 * 32 * 7 * 128 * 128
    # Backwards: Aqkᵀ do, Ainvᵀ dv_new, dAqk, dAkk 4 · 2 · 64² · 128; the same with K for q and k through the scores;
    # kg dh, qgᵀ do, wᵀ dv_new, dqg, dkb, dkg 6 · 2 · 64 · 128².
    backward = 8 * 2 * 64 * 64 * 128 + 6 * 2 * 64 * 128 * 128
    assert CASES["train-H96"].flops == pytest.approx(96 * 128 * (chunk + backward))
    # A tail counts by its tokens; of one token: 10 · 128 + 6 · 128² + 1/3. Sequences don't share chunks.
    one = 10 * 128 + 6 * 128 * 128 + 1 / 3
    assert Case("", 1, (65,)).flops == pytest.approx(chunk + one)
    assert Case("", 2, (1, 64, 1)).flops == pytest.approx(2 * (chunk + 2 * one))


def test_scaled_down() -> None:
    assert CASES["H96-mixed"].scaled_down().lengths == (40, 17, 64, 30, 8, 95)
    assert CASES["B64x4"].scaled_down() == Decode("B64x4", 2, (4,) * 4)
    assert (CASES["H8-T65536"].scaled_down().H, CASES["T64"].scaled_down().lengths) == (1, (2,))
