"""chunk_kda on one table of pools: torch, and the kernels of TileLang and PyPTO executed on the CPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from calls import dense
from pool_calls import CALLS, check
from pypto_process import in_its_own_process

import kda
from kda.golden import chunk_kda_golden, inputs, recurrent_kda_golden

LIMIT = 5e-6  # roundings in fp32


@pytest.mark.parametrize("name", CALLS)
def test_torch(name: str) -> None:
    check(name, "torch", LIMIT)


@pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="needs tilelang")
@pytest.mark.parametrize("name", CALLS)
def test_tilelang(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_EMULATE", "1")
    check(name, "tilelang", LIMIT)


@in_its_own_process
def test_pypto() -> None:
    for name in ("slots in place", "bf16 slots", "a batch with fresh sequences"):
        check(name, "pypto", LIMIT)


def test_where_no_sequence_takes_part_nothing_is_written() -> None:
    call = CALLS["slots in place"]() | {"ssm_state_indices": torch.full((6,), -1)}
    before = call["initial_state"].clone()
    o, _ = kda.chunk_kda(**call)
    assert not o.any() and torch.equal(call["initial_state"].nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("name", CALLS)
def test_the_goldens_agree(name: str) -> None:
    call = CALLS[name]()
    for chunked, stepped in zip(chunk_kda_golden(**call), recurrent_kda_golden(**call), strict=True):
        torch.testing.assert_close(chunked, stepped, equal_nan=True)


@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
@pytest.mark.parametrize("packed", [False, True])
def test_o_goes_to_the_callers_tensor(operator, packed) -> None:
    call = inputs.stable(1, 9, 2, 8, dtype=torch.float32, lengths=[5, 3] if packed else None)
    if packed:
        call |= {name: call[name][0] for name in ("q", "k", "v", "g", "beta")}
    expected, _ = operator(**call)
    out = torch.full((*call["v"].shape[:-1], 16), torch.nan)[..., :8]  # rows with gaps
    o, _ = operator(**call, out=out)
    assert o is out and torch.equal(out, expected)
    empty = {name: call[name].narrow(0 if packed else 1, 0, 0) for name in ("q", "k", "v", "g", "beta")}
    nothing = torch.empty_like(empty["v"])
    bounds = {"cu_seqlens": torch.tensor([0, 0])} if packed else {}
    assert operator(**call | empty | bounds, out=nothing)[0] is nothing


@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_gradients_reach_states_of_16_bits_and_in_slots(operator) -> None:
    call = dense(initial_state=torch.randn(5, 4, 4, 8).bfloat16().requires_grad_())
    _, states = operator(**call, ssm_state_indices=torch.tensor([3, 0]), output_final_state=True)
    states.float().sum().backward()
    gradient = call["initial_state"].grad
    assert gradient.dtype == torch.bfloat16 and gradient[3].any() and not gradient[[0, 1, 2, 4]].any()
