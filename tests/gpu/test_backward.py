"""Gradients of chunk_kda on the device: against the fp64 golden beyond the gates' sizes, and the launch path."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kda
from kda.backends.call import DIFFERENTIABLE, PER_TOKEN
from kda.golden import chunk_kda_backward_golden, inputs, rel_rmse

Call = dict[str, Any]

LIMIT, GATE_LIMIT = 8e-3, 1e-2
"""Relative RMSE, the latter of the gradients of g, A_log and dt_bias: half as much again where beta reaches 2."""

BF16, FP16 = torch.bfloat16, torch.float16
both_dtypes = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])


def leaves(call: Call) -> dict[str, Tensor]:
    return {name: call[name].detach().clone().requires_grad_() for name in DIFFERENTIABLE if name in call}


def outer(call: Call, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Gradients of o and of the final state, N(0, scale); where k is NaN, which is on the padding, so is that of o."""
    torch.manual_seed(1)
    d_o, d_state = scale * torch.randn_like(call["v"]), scale * torch.randn_like(final_state(call))
    return d_o.masked_fill(call["k"].isnan().any(-1).any(-1)[..., None, None], math.nan), d_state


def final_state(call: Call) -> Tensor:
    return kda.chunk_kda(**call, backend="tilelang")[1]


def gradients(call: Call, d_o: Tensor, d_state: Tensor, operator: Callable[..., Any] = kda.chunk_kda,
              **options: Any) -> dict[str, Tensor]:  # fmt: skip
    x = leaves(call)
    found = torch.autograd.grad(operator(**call | x, **options), list(x.values()), [d_o, d_state])
    return dict(zip(x, found, strict=True))


def ours(call: Call, d_o: Tensor, d_state: Tensor) -> dict[str, Tensor]:
    return gradients(call, d_o, d_state, backend="tilelang")


def felt(x: Tensor) -> Tensor:
    """x, with 0 for what fp32 has no normal number for: through gates of -inf the golden's gradients are 1e-45."""
    return x.double().masked_fill(x.abs() < torch.finfo(torch.float32).tiny, 0.0)


def check(call: Call) -> None:
    d_o, d_state = outer(call)
    expected = chunk_kda_backward_golden(d_o, d_state, **call)
    gate_limit = GATE_LIMIT * (1.5 if call.get("allow_neg_eigval") else 1.0)
    off = []
    for name, x in ours(call, d_o, d_state).items():
        assert x.isfinite().all() and x.dtype == call[name].dtype, name
        error = rel_rmse(felt(x), felt(expected[name]))
        off += [f"{name}: {error:.1e}"] if error > (gate_limit if name in ("g", "A_log", "dt_bias") else LIMIT) else []
    assert not off, off


LENGTHS = [0, 37, 640, 0, 1, 300, 64, 0]


def packed(*heads: int, generator: Any = inputs.raw, around: int = 70, **options: Any) -> Call:
    """Empty sequences, and padding before the first and behind the last one, of NaN."""
    call = generator(
        1, sum(LENGTHS) + 2 * around, *heads, lengths=LENGTHS, device="cuda", initial_state=True, **options
    )
    call["cu_seqlens"] = call["cu_seqlens"] + around
    for name in PER_TOKEN:
        call[name][:, :around] = math.nan
        call[name][:, -around:] = math.nan
    return call


@both_dtypes
@pytest.mark.parametrize("gate", ["logsigmoid", 0.0, -1.5, -5.0, -100.0, -math.inf, "half_1000", "mixed"])
def test_every_gate(gate: str | float, dtype: torch.dtype) -> None:
    check(inputs.stable(2, 300, 2, HV=4, gate=gate, dtype=dtype, device="cuda", initial_state=True))


@both_dtypes
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("sizes", [(64, 64), (64, 128), (128, 64), (128, 128)], ids=str)
def test_head_sizes_packed_with_nan_on_the_padding(
    sizes: tuple[int, int], lower_bound: float | None, dtype: torch.dtype
) -> None:
    options = {"HV": 4, "lower_bound": lower_bound, "allow_neg_eigval": lower_bound is not None}
    check(packed(2, *sizes, dtype=dtype, state_v_first=sizes[0] == sizes[1], **options))


@both_dtypes
def test_enough_heads_for_every_processor(dtype: torch.dtype) -> None:
    """All of V in one tile, and the kernels that walk the chunks one behind the other."""
    check(inputs.raw(4, 500, 8, HV=32, lower_bound=-5.0, dtype=dtype, device="cuda", initial_state=True))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gates_that_cannot_move_have_no_gradient(lower_bound: float | None) -> None:
    call = inputs.raw(1, 200, 2, lower_bound=lower_bound, device="cuda", initial_state=True)
    call |= {"A_log": torch.full_like(call["A_log"], 60.0), "dt_bias": 0 * call["dt_bias"]}
    found = ours(call, *outer(call))
    assert all(x.isfinite().all() for x in found.values()) and found["v"].any()
    for name in ("g", "A_log", "dt_bias"):
        assert found[name].abs().max() < 1e-6, name


@pytest.mark.parametrize("scale", [2.0**-10, 2.0**20])
def test_a_loss_scale_changes_exponents_alone(scale: float) -> None:
    call = inputs.raw(1, 500, 2, HV=4, lower_bound=-5.0, device="cuda", initial_state=True)
    plain, scaled = ours(call, *outer(call)), ours(call, *outer(call, scale))
    for name, x in scaled.items():
        assert x.isfinite().all() and x.any(), name
        assert rel_rmse(x.double() / scale, plain[name]) <= 1e-5, name


@both_dtypes
def test_30_runs_give_one_set_of_bits(dtype: torch.dtype) -> None:
    call = packed(4, dtype=dtype)
    given = outer(call)
    first = ours(call, *given)
    for _ in range(30):
        for name, x in ours(call, *given).items():
            assert torch.equal(x, first[name]), name


@pytest.mark.parametrize("generator", [inputs.raw, inputs.stable])
def test_auto_takes_it_and_compiles(generator: Callable[..., Call]) -> None:
    call = generator(1, 200, 2, HV=4, device="cuda", initial_state=True)
    given = outer(call)
    compiled = gradients(call, *given, operator=torch.compile(lambda **c: kda.chunk_kda(**c), fullgraph=True))
    for name, x in ours(call, *given).items():
        assert torch.equal(compiled[name], x), name


@pytest.mark.parametrize("heads", [2, 128])
def test_a_cuda_graph_captures_forward_and_backward(heads: int) -> None:
    """With few heads, a second stream takes part."""
    sizes = (1, sum(LENGTHS), heads)
    call, other = (inputs.raw(*sizes, lengths=LENGTHS, initial_state=True, seed=s, device="cuda") for s in (0, 1))
    x, given = leaves(call), outer(call)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(kda.chunk_kda(**call | x, backend="tilelang"), list(x.values()), given)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for each in (call, other, call):
        with torch.no_grad():
            for name, leaf in x.items():
                leaf.copy_(each[name])
        graph.replay()
        expected = ours(each, *given)
        for name, gradient in zip(x, found, strict=True):
            assert torch.equal(gradient, expected[name]), name


TIE = 1.05
"""Where both round the same tensors, two kernels' errors differ by chance."""


@pytest.mark.parametrize("T", [64, 256, 1024])
def test_near_identical_keys_are_no_worse_than_flas(T: int) -> None:
    """FLA's error is that of the better of its two forms."""
    fla = pytest.importorskip("fla.ops.kda")
    call = inputs.collinear(1, T, 2, device="cuda", initial_state=True)
    given = outer(call)
    expected = chunk_kda_backward_golden(*given, **call)
    theirs = [gradients(call, *given, operator=fla.chunk_kda, safe_gate=safe) for safe in (False, True)]
    worse = []
    for name, x in ours(call, *given).items():
        error, best = rel_rmse(x, expected[name]), min(rel_rmse(y[name], expected[name]) for y in theirs)
        print(f"T {T}, {name}: {error:.2e}, FLA {best:.2e}, ratio {error / best:.2f}")
        worse += [f"{name}: {error:.2e} > {best:.2e}"] if error > TIE * best else []
    assert not worse, worse
