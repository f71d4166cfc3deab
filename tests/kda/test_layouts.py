"""Strides and packing: a call gives what it gives on contiguous, batched tensors, and writes where it was told to."""

from __future__ import annotations

import pytest
import torch
from calls import CU, HV, PARAMETERS, B, H, K, T, V, dense, packed, pool

import kda


def double(call: dict[str, object]) -> dict[str, object]:
    is_float = lambda x: isinstance(x, torch.Tensor) and x.is_floating_point()  # noqa: E731
    return {name: x.double() if is_float(x) else x for name, x in call.items()}


def scattered(x: torch.Tensor) -> torch.Tensor:
    """The same values with other strides and NaN in between: rows apart, and the last two axes swapped in memory."""
    wide = torch.full((*x.shape[:-2], x.shape[-1] + 3, x.shape[-2] + 2), float("nan"), dtype=x.dtype)
    view = wide[..., 1 : 1 + x.shape[-1], : x.shape[-2]].transpose(-1, -2)
    view.copy_(x)
    assert not view.is_contiguous()
    return view


@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
@pytest.mark.parametrize("base", [dense, packed])
def test_strides_change_nothing(operator, base) -> None:
    good = double(base(**PARAMETERS, output_final_state=True))
    N = CU.numel() - 1 if base is packed else B
    good["initial_state"] = torch.randn(N, HV, V, K, dtype=torch.float64)
    names = ("q", "k", "v", "g", "beta", "initial_state")
    for chosen in [*((name,) for name in names), names]:
        o, state = operator(**good | {name: scattered(good[name]) for name in chosen})
        expected_o, expected_state = operator(**good)
        torch.testing.assert_close(o, expected_o, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state, expected_state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_slices_of_a_fused_projection(operator) -> None:
    sizes = {"q": (H, K), "k": (H, K), "v": (HV, V), "g": (HV, K), "beta": (HV, 1)}
    fused = torch.randn(B, T, sum(h * d for h, d in sizes.values()), dtype=torch.float64)
    parts = zip(sizes.items(), fused.split([h * d for h, d in sizes.values()], dim=-1), strict=True)
    sliced = {name: part.unflatten(-1, size) for (name, size), part in parts}
    sliced |= {"beta": sliced["beta"].squeeze(-1), "use_gate_in_kernel": True, "A_log": torch.zeros(HV),
               "use_beta_sigmoid_in_kernel": True}  # fmt: skip
    assert not sliced["q"].is_contiguous() and not sliced["beta"].is_contiguous()
    packed_up = {name: x.contiguous() if isinstance(x, torch.Tensor) else x for name, x in sliced.items()}
    torch.testing.assert_close(operator(**sliced)[0], operator(**packed_up)[0], rtol=1e-12, atol=1e-12)


def test_a_padded_pool_is_written_in_its_own_memory() -> None:
    arguments = pool()
    dense_pool = arguments["initial_state"]
    memory = torch.full((dense_pool.shape[0], HV, V + 1, K + 2), -7.0)
    padded = memory[:, :, :V, :K]
    padded.copy_(dense_pool)
    o, state = kda.fused_recurrent_kda(**arguments | {"initial_state": padded}, output_final_state=True)
    expected_o, expected = kda.fused_recurrent_kda(**arguments, output_final_state=True)
    assert state.data_ptr() == memory.data_ptr() and expected is dense_pool
    torch.testing.assert_close(padded, dense_pool)
    torch.testing.assert_close(o, expected_o)
    assert not torch.equal(dense_pool, pool()["initial_state"]), "the pool was written"
    assert (memory[:, :, V:] == -7.0).all() and (memory[..., K:] == -7.0).all(), "nothing beside it was"


@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_rank_3_in_rank_3_out(operator) -> None:
    flat = packed(output_final_state=True)
    batched = {name: x[None] if name in dense() else x for name, x in flat.items()}
    (o, state), (batched_o, batched_state) = operator(**flat), operator(**batched)
    assert o.shape == (T, HV, V) and batched_o.shape == (1, T, HV, V) and state.shape == (3, HV, V, K)
    assert torch.equal(o, batched_o[0]) and torch.equal(state, batched_state)
