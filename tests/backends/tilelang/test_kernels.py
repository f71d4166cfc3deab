"""The TileLang kernels, executed on the CPU in float32 and held to the fp64 golden, stage by stage."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from kda.golden import chunk_kda_golden, chunk_kda_stages, inputs
from kda.golden.constants import CHUNK_SIZE

tilelang = pytest.importorskip("tilelang")

from kda.backends.tilelang import cpu_trace as cpu  # noqa: E402
from kda.backends.tilelang.chunk_table import UNUSED, columns, num_entries, parts  # noqa: E402
from kda.backends.tilelang.kernels.carry import carry  # noqa: E402
from kda.backends.tilelang.kernels.chunk_delta_h import chunk_delta_h  # noqa: E402
from kda.backends.tilelang.kernels.chunk_o import chunk_o  # noqa: E402
from kda.backends.tilelang.kernels.plan import plan  # noqa: E402
from kda.backends.tilelang.kernels.prepare import prepare  # noqa: E402

TOLERANCE = 3e-6
"""Of the largest element of a tensor: a few roundings in float32, a hundred times below what a wrong formula costs."""

GATES = ["logsigmoid", -1.5, -5.0, 0.0, float("-inf"), "half_1000", "mixed"]


@functools.cache
def build(builder: Any, **parameters: Any) -> Any:
    with cpu.cpu_trace():
        kernel = builder(**parameters)
    return tilelang.compile(kernel, target=cpu.CPU_TARGET, execution_backend=cpu.CPU_EXECUTION_BACKEND)


def poison(*shape: int) -> Tensor:
    """An output as it may come from the allocator."""
    return torch.full(shape, float("nan"))


def run(call: dict[str, Any]) -> dict[str, Tensor]:
    """Every kernel on one call of the operator: tables by the golden's stage names, o and the state by both routes."""
    q, v, cu_seqlens, state = call["q"], call["v"], call.get("cu_seqlens"), call.get("initial_state")
    varlen = cu_seqlens is not None
    (B, seq_len, H, K), (HV, V) = q.shape, v.shape[2:]
    total, N = B * seq_len, len(cu_seqlens) - 1 if varlen else B
    entries = num_entries(total, N, varlen)
    cu_dtype = str(cu_seqlens.dtype).removeprefix("torch.") if varlen else "int32"
    tokens = [call[name].contiguous() for name in ("q", "k", "v", "g", "beta")]

    table = poison(entries, HV, CHUNK_SIZE, columns(K, V, with_ainv=True).width)
    decay, h, v_new = poison(entries, HV, K), poison(entries, HV, V, K), poison(entries, HV, CHUNK_SIZE, V)
    o, o_pair = poison(B, seq_len, HV, V), poison(B, seq_len, HV, V)
    owner = torch.full((entries,), 99, dtype=torch.int32)
    order = torch.full((N,), 99, dtype=torch.int32)
    which = [seq_len]
    owners = [seq_len]
    if varlen:
        which, owners = [cu_seqlens, order], [cu_seqlens, owner]
        clear = build(plan, HV=HV, V=V, dtype="float32", cu_dtype=cu_dtype)
        clear(cu_seqlens, owner, order, torch.empty_like(o))

    gate = call.get("use_gate_in_kernel", False)
    bounded = call.get("lower_bound") is not None
    common = {"HV": HV, "K": K, "V": V, "dtype": "float32", "varlen": varlen, "cu_dtype": cu_dtype}
    build(
        prepare,
        H=H,
        g_dtype="float32",
        beta_dtype="float32",
        use_qk_l2norm=call.get("use_qk_l2norm_in_kernel", False),
        use_gate=gate,
        bounded_gate=bounded,
        use_beta_sigmoid=call.get("use_beta_sigmoid_in_kernel", False),
        allow_neg_eigval=call.get("allow_neg_eigval", False),
        with_ainv=True,
        **common,
    )(
        *tokens,
        *([call["A_log"].flatten(), call["dt_bias"]] if gate else []),
        *([call["lower_bound"]] if bounded else []),
        K**-0.5,
        *owners,
        table,
        decay,
    )

    states = {"state_v_first": call["state_v_first"], "has_initial_state": state is not None, "has_final_state": True}
    initial = [] if state is None else [state]
    final = poison(N, HV, *((V, K) if call["state_v_first"] else (K, V)))
    final_pair = final.clone()
    without_ainv = table[..., : columns(K, V, with_ainv=False).width].contiguous()
    build(carry, with_ainv=False, **common, **states)(without_ainv, decay, *initial, *which, o, final)
    build(chunk_delta_h, **common, **states)(table, decay, *initial, *which, h, v_new, final_pair)
    build(chunk_o, block_V=min(V, 128), **common)(table, h, v_new, *owners, o_pair)
    used = used_entries(call, entries)
    if varlen:
        for out in (o, o_pair):
            assert out[0, cu_seqlens[-1] :].isnan().all(), "a store went past the last sequence"
            clear(cu_seqlens, owner, order, out)
        assert owner.ne(UNUSED).nonzero()[:, 0].equal(used)
        assert order.equal(cu_seqlens.diff().argsort(descending=True, stable=True).int())
    tables = parts(table, K, V) | {"decay": decay, "h": h.mT, "v_new": v_new}
    return {name: x[used] for name, x in tables.items()} | {
        "o": o,
        "o of the pair": o_pair,
        "final_state": final,
        "final_state of the pair": final_pair,
    }


def used_entries(call: dict[str, Any], entries: int) -> Tensor:
    if call.get("cu_seqlens") is None:
        return torch.arange(entries)
    bounds = call["cu_seqlens"].tolist()
    ranges = [
        bos // CHUNK_SIZE + n + torch.arange(-(-(eos - bos) // CHUNK_SIZE))
        for n, (bos, eos) in enumerate(itertools.pairwise(bounds))
    ]
    return torch.cat(ranges)


def check(call: dict[str, Any]) -> None:
    """All stages, o and the final state against the golden; the message names the first stage that departs."""
    actual = run(call)
    o, final_state = chunk_kda_golden(**call)
    expected = chunk_kda_stages(**call) | {"o": o, "final_state": final_state}
    for name, x in actual.items():
        y = expected[name.removesuffix(" of the pair")]
        if y.numel():
            error, largest = (x.double() - y).abs().max(), y.abs().max()
            assert error <= TOLERANCE * (largest + 1e-3), f"{name}: off by {error:.2e}, largest {largest:.2e}"


@pytest.mark.parametrize("gate", GATES)
def test_gates(gate: str | float) -> None:
    check(inputs.stable(2, 150, 2, 64, gate=gate, dtype=torch.float32, initial_state=True))


@pytest.mark.parametrize("T", [1, 15, 17, 63, 64, 65, 127, 128, 129])
def test_tails(T: int) -> None:
    check(inputs.stable(2, T, 2, 64, dtype=torch.float32, initial_state=True, seed=T))


def test_every_length_up_to_200() -> None:
    lengths = range(201)
    check(
        inputs.stable(1, sum(lengths), 1, 64, 128, lengths=lengths, gate="mixed", dtype=torch.float32)
        | {"state_v_first": False}
    )


@pytest.mark.parametrize(
    "lengths",
    [[0, 5, 0, 65], [0, 0, 0], [128, 0, 128], [1] * 70, [64, 64, 64], [200]],
    ids=lambda x: f"{len(x)}x{x[0]}",
)
def test_varlen_with_empty_sequences_and_padding(lengths: list[int]) -> None:
    total = sum(lengths) + 75
    call = inputs.stable(1, total, 1, 64, 128, lengths=lengths, dtype=torch.float32, state_v_first=False)
    for name in ("q", "k", "v", "g", "beta"):
        call[name][:, sum(lengths) :] = float("nan")
    check(call)


@pytest.mark.parametrize("N", [1, 300, 4096, 4097])
def test_the_longest_sequences_come_first_up_to_4096(N: int) -> None:
    lengths = torch.randint(0, 9, (N,), generator=torch.Generator().manual_seed(0))
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = int(cu_seqlens[-1])
    owner = torch.empty(num_entries(tokens, N, varlen=True), dtype=torch.int32)
    order, o = torch.full((N,), 9999, dtype=torch.int32), torch.empty(1, tokens, 1, 64)
    build(plan, HV=1, V=64, dtype="float32", cu_dtype="int64")(cu_seqlens, owner, order, o)
    by_length = lengths.argsort(descending=True, stable=True)
    assert order.equal(by_length.int() if N <= 4096 else torch.arange(N, dtype=torch.int32))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_activations_in_the_kernel(lower_bound: float | None) -> None:
    call = inputs.raw(
        1, 200, 1, 128, 64, 2, lengths=[70, 0, 130], lower_bound=lower_bound, allow_neg_eigval=lower_bound is not None,
        dtype=torch.float32, initial_state=True,
    )  # fmt: skip
    call["g"][:, ::7] *= 60.0  # saturated gates, to both sides
    call["cu_seqlens"] = call["cu_seqlens"].long()
    check(call)
    no_decay = {"A_log": call["A_log"] + 200.0, "g": call["g"].clamp(max=2.0) - 300.0}
    check(call | no_decay)  # in fp32 an infinite rate times a softplus of 0


def test_collinear_keys() -> None:
    check(inputs.collinear(1, 150, 2, 64, dtype=torch.float32, initial_state=True))


def test_a_prefix_does_not_see_later_tokens() -> None:
    """Bit for bit: nothing in row i of a chunk depends on a later row."""
    call = inputs.stable(1, 64, 2, 64, gate="mixed", dtype=torch.float32, initial_state=True)
    whole = run(call)
    for name in ("q", "k", "v", "g", "beta"):
        call[name] = call[name].clone()
        call[name][:, 37:] *= 0.5
    changed = run(call)
    for name in ("qg", "w", "u", "Aqk"):
        assert torch.equal(whole[name][:, :, :37], changed[name][:, :, :37]), name
    assert torch.equal(whole["o"][:, :37], changed["o"][:, :37])
