"""The PyPTO kernels, executed by PyPTO's interpreter: against the fp64 recurrence, the golden's stages, and bit by bit.

Every reference is computed before the kernel runs, and must not be zero.
"""

from __future__ import annotations

import pytest
import torch
from pypto_process import in_its_own_process
from torch import Tensor

import kda
from kda import backends, golden
from kda.checks import checked
from kda.golden import inputs, rel_rmse

PRECISE = 2e-6  # relative RMSE of what is computed in fp32 throughout
ROUNDED = {"float32": PRECISE, "bfloat16": 3e-3, "float16": 4e-4}  # the same, once o is rounded
CHUNK = 128


def chunk_kda(call: dict) -> tuple[Tensor, Tensor]:
    return kda.chunk_kda(**call, backend="pypto")


def recurrent(call: dict) -> tuple[Tensor, Tensor]:
    return kda.fused_recurrent_kda(**call, backend="pypto")


def agree(call: dict, run=chunk_kda) -> None:
    """o and the final state are the recurrence's."""
    expected_o, expected_state = golden.recurrent_kda_golden(**call)
    assert not expected_o.numel() or expected_o.abs().max() > 0
    assert expected_state.abs().max() > 0
    o, state = run(call)
    assert o.dtype == call["v"].dtype and o.shape == call["v"].shape and state.dtype == torch.float32
    limit = ROUNDED[str(o.dtype).removeprefix("torch.")]
    assert not o.numel() or rel_rmse(o, expected_o) < limit
    assert rel_rmse(state, expected_state) < PRECISE


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@in_its_own_process
def test_lengths(dtype: str) -> None:
    """Tails, and counts of chunks that the unrolled loop divides evenly, with a rest, and not at all."""
    dtype = getattr(torch, dtype)
    for T in (1, 37, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK, 5 * CHUNK + 3):
        agree(inputs.stable(1, T, 1, dtype=dtype, initial_state=True))
    agree(inputs.stable(2, 130, 1, dtype=dtype))


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@in_its_own_process
def test_packed_lengths(dtype: str) -> None:
    dtype = getattr(torch, dtype)
    for lengths in ([64, 200, 320], [100, 128, 284], [0, 5, 0, 129], [3, 0]):
        agree(inputs.stable(1, sum(lengths), 2, lengths=lengths, dtype=dtype, initial_state=True))
    call = inputs.stable(1, 150, 1, lengths=[20, 130], dtype=dtype)
    agree({**call, "cu_seqlens": call["cu_seqlens"].long()})


@in_its_own_process
def test_gates() -> None:
    """Exact whatever the decay: no pivot, no cap."""
    for gate in (0.0, -1.5, -2.0, -5.0, -1000.0, float("-inf"), "half_1000", "mixed"):
        agree(inputs.stable(1, 200, 1, gate=gate, lengths=[63, 0, 137], dtype=torch.float32, initial_state=True))


@in_its_own_process
def test_gates_with_a_lower_bound() -> None:
    """Exact from open to shut and where they alternate, in chunks that are full or cut."""
    call = inputs.raw(1, 200, 1, lower_bound=-5.0, lengths=[63, 0, 137], dtype=torch.float32, initial_state=True)
    alternating = torch.arange(200)[:, None, None] % 3 - 1
    for gate in (200.0, -200.0, 400.0 * alternating):
        agree({**call, "g": call["g"] + gate})
    agree(inputs.raw(1, 140, 1, 64, 64, 2, lower_bound=-0.1, dtype=torch.float32))


@in_its_own_process
def test_flags() -> None:
    raw = inputs.raw(1, 140, 1, HV=2, dtype=torch.float32, initial_state=True)
    agree(raw)
    agree(inputs.raw(1, 140, 1, dtype=torch.float16))
    agree({**raw, "dt_bias": None, "allow_neg_eigval": True})
    bounded = inputs.raw(1, 140, 1, lower_bound=-5.0, dtype=torch.bfloat16)
    agree(bounded)
    agree({**bounded, "A_log": None, "scale": 0.5})
    saturated = {**raw, "A_log": raw["A_log"] + 200.0, "g": raw["g"] - 200.0}  # exp(A_log) is inf, softplus is 0
    expected_o, _ = kda.chunk_kda(**saturated, backend="torch")
    assert rel_rmse(chunk_kda(saturated)[0], expected_o) < PRECISE
    stable = inputs.stable(1, 140, 1, dtype=torch.float32)
    normed = {**stable, "use_qk_l2norm_in_kernel": True}
    agree(normed)
    assert (chunk_kda(normed)[0] - chunk_kda(stable)[0]).abs().max() > 1e-4


@in_its_own_process
def test_head_sizes_and_groups() -> None:
    for K, V in ((64, 128), (128, 64), (64, 64)):
        call = inputs.stable(1, 150, 1, K, V, 4, lengths=[130, 20], dtype=torch.float32, initial_state=True)
        k_first = {**call, "initial_state": call["initial_state"].mT.contiguous(), "state_v_first": False}
        agree(call)
        agree(k_first)
        (o, state), (k_first_o, k_first_state) = chunk_kda(call), chunk_kda(k_first)
        assert same_bits(o, k_first_o) and same_bits(state, k_first_state.mT)


@in_its_own_process
def test_bits() -> None:
    """Repetition, packing, later tokens and padding change no bit."""
    call = inputs.stable(1, 300, 2, gate="mixed", dtype=torch.bfloat16, initial_state=True)
    o, state = chunk_kda(call)
    assert o.abs().max() > 0
    again_o, again_state = chunk_kda(call)
    assert same_bits(o, again_o) and same_bits(state, again_state)
    packed_o, packed_state = chunk_kda({**call, "cu_seqlens": torch.tensor([0, 300])})
    assert same_bits(o, packed_o) and same_bits(state, packed_state)

    tokens = ("q", "k", "v", "g", "beta")
    later = {**call, **{name: call[name].clone() for name in tokens}}
    for name in tokens:
        later[name][:, 201:] *= 0.5
    assert same_bits(chunk_kda(later)[0][:, :201], o[:, :201])

    first_o, first_state = chunk_kda({**call, **{name: call[name][:, :201] for name in tokens}})
    for poison in (1e30, float("nan")):
        for name in tokens:
            later[name][:, 201:] = -poison if name == "g" else poison
        padded_o, padded_state = chunk_kda({**later, "cu_seqlens": torch.tensor([0, 201])})
        assert same_bits(padded_o[:, :201], first_o) and same_bits(padded_state, first_state)
        assert not padded_o[:, 201:].any()


@in_its_own_process
def test_stages() -> None:
    """Every tensor of M1 to M4 is the golden's."""
    call = inputs.raw(1, 170, 1, HV=2, lengths=[10, 0, 160], dtype=torch.float32, initial_state=True)
    expected = golden.chunk_kda_stages(**call, chunk_size=CHUNK)
    actual = backends.load("pypto").stages(checked("chunk_kda", **call))
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert tensor.shape == expected[name].shape and expected[name].abs().max() > 0, name
        assert rel_rmse(tensor, expected[name]) < PRECISE, name


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@in_its_own_process
def test_recurrence(dtype: str) -> None:
    dtype = getattr(torch, dtype)
    agree(inputs.stable(1, 12, 1, HV=2, gate="mixed", lengths=[1, 0, 4, 7], dtype=dtype, initial_state=True), recurrent)
    raw = inputs.raw(2, 5, 1, K=64, V=128, dtype=dtype, initial_state=True)
    agree(raw, recurrent)
    k_first = {**raw, "initial_state": raw["initial_state"].mT.contiguous(), "state_v_first": False}
    agree({**k_first, "use_qk_l2norm_in_kernel": False, "q": raw["q"] * 0.1, "k": raw["k"] * 0.1}, recurrent)
    agree(inputs.raw(1, 5, 1, lower_bound=-5.0, dtype=dtype), recurrent)


@pytest.mark.parametrize("gap", [0, 16], ids=["contiguous", "with gaps"])
@in_its_own_process
def test_pool(gap: int) -> None:
    """[N] indices, in place and not: null and negative slots, an empty sequence, untouched slots."""
    call = inputs.stable(1, 7, 1, lengths=[2, 1, 3, 1, 0], dtype=torch.float32)
    buffer = torch.randn(9, 1, 128, 128 + gap, generator=torch.Generator().manual_seed(0))
    buffer[0] = float("nan")
    before, pool = buffer.clone(), buffer[..., :128]
    call |= {"initial_state": pool, "ssm_state_indices": torch.tensor([5, 0, 8, -3, 2])}
    expected_o, expected = golden.recurrent_kda_golden(**call)
    assert expected_o.abs().max() > 0
    o, states = recurrent(call)
    assert rel_rmse(o, expected_o) < PRECISE and not o[0, 2].any() and not o[0, 6].any()
    assert rel_rmse(states, expected) < PRECISE and not states[[1, 3]].any()
    assert same_bits(states[4], before[2, ..., :128]), "an empty sequence passes its state on"
    assert same_bits(buffer, before)

    o, returned = recurrent({**call, "inplace_final_state": True})
    assert returned is pool and rel_rmse(o, expected_o) < PRECISE
    assert rel_rmse(pool[[5, 8]], expected[[0, 2]]) < PRECISE
    untouched = [0, 1, 2, 3, 4, 6, 7]
    assert same_bits(buffer[untouched], before[untouched]) and same_bits(buffer[..., 128:], before[..., 128:])


@pytest.mark.parametrize("gap", [0, 16], ids=["contiguous", "with gaps"])
@in_its_own_process
def test_drafts(gap: int) -> None:
    """[N, S] indices: a state after every token, and a start after the last one that was accepted."""
    call = inputs.stable(1, 7, 1, lengths=[3, 1, 0, 3], dtype=torch.float32)
    buffer = torch.randn(11, 1, 128, 128 + gap, generator=torch.Generator().manual_seed(0))
    before, pool = buffer.clone(), buffer[..., :128]
    # Past the end of a sequence stand slots of another one, as in a batch that an engine uses again.
    slots = torch.tensor([[1, 2, 3], [4, 2, 2], [6, 7, 8], [9, 0, 10]], dtype=torch.int32)
    call |= {"initial_state": pool, "ssm_state_indices": slots}
    for accepted in (None, torch.tensor([3, 1, 1, 3], dtype=torch.int32)):
        buffer.copy_(before)
        call["num_accepted_tokens"] = accepted
        expected_o, expected = golden.recurrent_kda_golden(**call)
        _, expected_pool = golden.recurrent_kda_golden(**call, inplace_final_state=True)
        assert expected_o.abs().max() > 0
        o, states = recurrent(call)
        assert rel_rmse(o, expected_o) < PRECISE and rel_rmse(states, expected) < PRECISE
        assert same_bits(buffer, before)
        o, returned = recurrent({**call, "inplace_final_state": True})
        assert returned is pool and rel_rmse(o, expected_o) < PRECISE
        assert rel_rmse(pool, expected_pool) < PRECISE
        untouched = [0, 5, 6, 7, 8]
        assert same_bits(buffer[untouched], before[untouched]) and same_bits(buffer[..., 128:], before[..., 128:])


@in_its_own_process
def test_inplace_without_a_pool() -> None:
    call = inputs.stable(2, 2, 1, dtype=torch.float32, initial_state=True)
    for start in (call["initial_state"].clone(), call["initial_state"].mT.contiguous().mT):
        _, expected = golden.recurrent_kda_golden(**call)
        _, returned = recurrent({**call, "initial_state": start, "inplace_final_state": True})
        assert returned is start and rel_rmse(start, expected) < PRECISE


@in_its_own_process
def test_backends_agree() -> None:
    """torch, TileLang executed on the CPU and PyPTO interpreted, on one call: results, and the stages all hand out."""
    call = inputs.raw(1, 150, 1, HV=2, lengths=[50, 100], dtype=torch.float32, initial_state=True)
    names = [name for name in ("torch", "tilelang", "pypto") if not backends.unusable(name)]
    assert {"torch", "pypto"} <= set(names)
    results = {name: kda.chunk_kda(**call, backend=name) for name in names}
    for name in names:
        for mine, others in zip(results["pypto"], results[name], strict=True):
            assert others.abs().max() > 0 and rel_rmse(mine, others) < 1e-5, name
    # Chunks have 64 rows elsewhere and 128 here: of sequences that fit in one, the stages mean the same.
    short = inputs.raw(1, 64, 1, HV=2, lengths=[50, 14], dtype=torch.float32, initial_state=True)
    tables = {name: backends.load(name).stages(checked("chunk_kda", **short)) for name in names}
    shared = set.intersection(*(set(table) for table in tables.values()))
    assert {"Aqk", "qg", "kg", "decay", "w", "u", "h", "v_new"} <= shared
    for stage in shared:
        for name in names:
            others = tables[name][stage]
            mine = tables["pypto"][stage][tuple(slice(size) for size in others.shape)]
            assert others.abs().max() > 0 and rel_rmse(mine, others) < 1e-5, (stage, name)
