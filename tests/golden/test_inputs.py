"""The seeded inputs: shapes, dtypes, the gates they promise, the same bits each time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kda.checks import checked
from kda.golden import chunk_kda_golden, inputs, rel_rmse

GENERATORS = [inputs.stable, inputs.raw, inputs.alike, inputs.collinear, inputs.cancellation_stress]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(x, b[name]) if isinstance(x, Tensor) else x == b[name] for name, x in a.items()
    )


@pytest.mark.parametrize("generator", GENERATORS)
def test_shapes_and_dtypes(generator: Any) -> None:
    call = generator(1, 40, 2, 16, V=8, HV=4, lengths=[20, 0, 15], dtype=torch.float16, initial_state=True)
    shapes = {"q": (2, 16), "k": (2, 16), "v": (4, 8), "g": (4, 16), "beta": (4,)}
    for name, shape in shapes.items():
        assert call[name].shape == (1, 40, *shape), name
    raw = generator is inputs.raw
    assert all(call[name].dtype == torch.float16 for name in ("q", "k", "v"))
    assert all(call[name].dtype == (torch.float16 if raw else torch.float32) for name in ("g", "beta"))
    assert call["cu_seqlens"].tolist() == [0, 20, 20, 35] and call["cu_seqlens"].dtype == torch.int32
    assert call["initial_state"].shape == (3, 4, 8, 16) and call["initial_state"].dtype == torch.float32
    o, state = chunk_kda_golden(**call)
    assert o.isfinite().all() and state.isfinite().all() and state.abs().max() < 100
    kv = generator(1, 40, 2, 16, V=8, lengths=[40], initial_state=True, state_v_first=False)
    assert kv["initial_state"].shape == (1, 2, 16, 8) and kv["state_v_first"] is False


@pytest.mark.parametrize("generator", GENERATORS)
def test_the_seed_alone_decides(generator: Any) -> None:
    call = generator(2, 20, 1, 16, initial_state=True, seed=3)
    torch.manual_seed(0)
    assert same(call, generator(2, 20, 1, 16, initial_state=True, seed=3))
    assert not same(call, generator(2, 20, 1, 16, initial_state=True, seed=4))


@pytest.mark.parametrize("generator", GENERATORS)
def test_the_device_is_where_the_tensors_go(generator: Any) -> None:
    call = generator(1, 8, 1, 16, initial_state=True, lengths=[8], device="meta")
    assert all(x.device.type == "meta" for x in call.values() if isinstance(x, Tensor))


def test_gates() -> None:
    shape = (2, 200, 2, 16)
    assert inputs.stable(*shape)["g"].max() < 0 and inputs.stable(*shape)["g"].min() > -10
    assert inputs.stable(*shape, gate=-1.5)["g"].eq(-1.5).all()
    half = inputs.stable(*shape, gate="half_1000")["g"]
    strong = half.eq(-1000).all(-1).all(-1)
    assert torch.equal(strong, half.eq(-1000).any(-1).any(-1)) and 0.4 < strong.float().mean() < 0.6
    mixed = inputs.stable(*shape, gate="mixed")["g"]
    for value in (0.0, -1000.0, -math.inf):
        assert mixed.eq(value).any()
    assert ((mixed > -10) & (mixed < 0)).any()
    with pytest.raises(ValueError, match="expected a number or one of logsigmoid, half_1000, mixed, got 'half'"):
        inputs.stable(*shape, gate="half")


def test_raw_is_the_production_form() -> None:
    call = inputs.raw(1, 50, 2, 16, HV=4, lower_bound=-5.0, allow_neg_eigval=True)
    assert call["A_log"].shape == (4,) and call["dt_bias"].shape == (64,)
    assert call["A_log"].min() >= 0 and call["A_log"].max() <= math.log(16)
    step = torch.nn.functional.softplus(call["dt_bias"])
    assert step.min() >= 1e-3 - 1e-6 and step.max() <= 0.1 + 1e-6
    assert call["lower_bound"] == -5.0
    assert all(call[f"use_{x}_in_kernel"] for x in ("qk_l2norm", "gate", "beta_sigmoid")) and call["allow_neg_eigval"]


@pytest.mark.parametrize("cosine", [0.9, 0.999])
def test_alike_keys_have_the_cosine_asked_for(cosine: float) -> None:
    call = inputs.alike(1, 50, 2, dtype=torch.float64, cosine=cosine, beta=0.95, positive=False)
    for name in ("q", "k"):
        x = call[name][0].transpose(0, 1)
        pairs = (x @ x.mT)[:, ~torch.eye(50, dtype=torch.bool)]
        assert (pairs.mean() - cosine).abs() < (1 - cosine) / 4
    assert (call["beta"] == torch.tensor(0.95)).all() and (call["v"] < 0).any()
    assert not (inputs.alike(1, 9, 1)["v"] < 0).any()
    free = inputs.alike(1, 50, 2, dtype=torch.float64, shared_queries=False)["q"][0].transpose(0, 1)
    assert (free @ free.mT)[:, ~torch.eye(50, dtype=torch.bool)].mean().abs() < 0.1


def test_collinear_keys_are_that() -> None:
    call = inputs.collinear(1, 50, 2, dtype=torch.float64)
    k = call["k"][0, :, 0]
    assert (k @ k.T).min() > 0.999 and k.min() > 0 and call["v"].min() >= 0
    assert call["beta"].min() > 0.99 and call["g"].max() <= 0 and call["g"].min() > -1e-3


def test_cancellation_stress_is_the_worst_of_its_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    stable, worst = inputs.stable(1, 128, 1, 64), inputs.cancellation_stress(1, 128, 1, 64)
    assert inputs.cancellation(worst) > 3 * inputs.cancellation(stable)
    rescaled = worst["v"].double() / stable["v"].double()
    assert rel_rmse(rescaled, torch.full_like(rescaled, rescaled.mean().item())) < 1e-2
    monkeypatch.setattr(inputs, "TRIALS", 4)
    assert inputs.cancellation(inputs.cancellation_stress(1, 128, 1, 64)) < inputs.cancellation(worst)


def test_lengths_must_fit() -> None:
    with pytest.raises(ValueError, match="B = 1 and a sum <= T = 10, got B = 1, a sum of 12"):
        inputs.stable(1, 10, 1, lengths=[5, 7])
    with pytest.raises(ValueError, match="got B = 2"):
        inputs.raw(2, 10, 1, lengths=[5])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_front_end_takes_every_generators_call(dtype: torch.dtype) -> None:
    for generator in (inputs.stable, inputs.raw, inputs.collinear):
        checked("chunk_kda", **generator(1, 5, 1, 16, dtype=dtype, initial_state=True))
