"""The kernels of the backward pass, executed on the CPU in float32 and held to the fp64 golden, each by itself.

Every kernel is fed the golden's own tensors, so that no other kernel's fault reaches it. test_gradients.py runs
them one behind the other.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kda.golden import chunk_kda_backward_golden, chunk_kda_backward_stages, chunk_kda_stages, inputs
from kda.golden.constants import CHUNK_SIZE as C

tilelang = pytest.importorskip("tilelang")

from kda.backends.tilelang import cpu_trace as cpu  # noqa: E402
from kda.backends.tilelang.chunk_table import UNUSED, num_entries  # noqa: E402
from kda.backends.tilelang.kernels.backward.carry import carry  # noqa: E402
from kda.backends.tilelang.kernels.backward.prepare import prepare  # noqa: E402
from kda.backends.tilelang.kernels.plan import plan  # noqa: E402

TOLERANCE = 5e-6
"""Of the largest element of a tensor: a few roundings in float32, a hundred times below what a wrong formula costs."""

FLOOR = dict.fromkeys(("dg", "ddt_bias", "dA_log"), 1e-2)
"""Counts as a tensor's largest element where that is smaller: the terms of these sums are, and in part they cancel."""

PER_TOKEN = ("dv", "dq", "dk", "dg", "dbeta")


@functools.cache
def build(builder: Any, **parameters: Any) -> Any:
    with cpu.cpu_trace():
        kernel = builder(**parameters)
    return tilelang.compile(kernel, target=cpu.CPU_TARGET, execution_backend=cpu.CPU_EXECUTION_BACKEND)


def poison(*shape: int) -> Tensor:
    """An output as it may come from the allocator."""
    return torch.full(shape, math.nan)


class Case:
    """A call, the gradients it is given, and where its chunks and tokens are."""

    def __init__(self, call: dict[str, Any], d_final_state: bool = True) -> None:
        self.call, q, v = call, call["q"], call["v"]
        (self.B, self.T, self.H, self.K), (self.HV, self.V) = q.shape, v.shape[2:]
        cu_seqlens = call.get("cu_seqlens")
        self.varlen = cu_seqlens is not None
        bounds = cu_seqlens.tolist() if self.varlen else range(0, (self.B + 1) * self.T, self.T)
        self.N, self.entries = len(bounds) - 1, num_entries(self.B * self.T, len(bounds) - 1, self.varlen)
        chunks = [
            ((bos // C + n if self.varlen else n * -(-self.T // C)) + i, n, range(start, min(start + C, eos)))
            for n, (bos, eos) in enumerate(itertools.pairwise(bounds))
            for i, start in enumerate(range(bos, eos, C))
        ]
        self.used = torch.tensor([entry for entry, _, _ in chunks])
        self.owner = torch.full((self.entries,), UNUSED, dtype=torch.int32)
        self.owner[self.used] = torch.tensor([n for _, n, _ in chunks], dtype=torch.int32)
        self.tokens = torch.tensor([t for _, _, tokens in chunks for t in tokens])
        self.rows = torch.tensor([c * C + i for c, (_, _, tokens) in enumerate(chunks) for i in range(len(tokens))])
        self.order = torch.tensor(bounds).diff().argsort(descending=True, stable=True).int()
        if self.varlen:
            self.sequences, self.owners = (cu_seqlens, self.order), (cu_seqlens, self.owner)
        else:
            self.sequences = self.owners = (self.T,)
        generator = torch.Generator().manual_seed(1)
        self.d_o = torch.randn(v.shape, generator=generator)
        padding = torch.ones(self.B * self.T, dtype=torch.bool)
        padding[self.tokens] = False
        for x in (self.d_o, *(call[name] for name in ("q", "k", "v", "g", "beta"))):
            x.view(-1, *x.shape[2:])[padding] = math.nan
        self.padding = padding
        state = (self.V, self.K) if call["state_v_first"] else (self.K, self.V)
        self.d_final_state = torch.randn(self.N, self.HV, *state, generator=generator) if d_final_state else None

    @functools.cached_property
    def forward(self) -> dict[str, Tensor]:
        return chunk_kda_stages(**self.call)

    @functools.cached_property
    def backward(self) -> dict[str, Tensor]:
        return chunk_kda_backward_stages(self.d_o, self.d_final_state, **self.call)

    def placed(self, x: Tensor) -> Tensor:
        """The golden's table at the entries of its chunks, in float32; whatever is in the others."""
        table = poison(self.entries, *x.shape[1:])
        table[self.used] = x.float()
        return table

    @property
    def common(self) -> dict[str, Any]:
        cu_dtype = str(self.call["cu_seqlens"].dtype).removeprefix("torch.") if self.varlen else "int32"
        shape = {"HV": self.HV, "K": self.K, "V": self.V, "dtype": "float32"}
        return shape | {"varlen": self.varlen, "cu_dtype": cu_dtype}


def check_carry(case: Case, block_V: int = 64) -> None:
    forward = {name: case.forward[name] for name in ("qg", "kg", "w", "u", "Aqk", "Ainv")}
    dh, ndb = poison(case.entries, case.HV, case.V, case.K), poison(case.entries, case.HV, C, case.V)
    options = {"state_v_first": case.call["state_v_first"], "block_V": block_V}
    has_initial = case.call.get("initial_state") is not None
    options |= {"has_d_final_state": case.d_final_state is not None, "has_d_initial_state": has_initial}
    final = [] if case.d_final_state is None else [case.d_final_state]
    initial = [torch.full_like(case.call["initial_state"], math.nan)] if has_initial else []
    table = case.placed(torch.cat([forward[name] for name in forward], -1))
    kernel = build(carry, **case.common, **options)
    kernel(table, case.placed(case.forward["decay"]), case.d_o, *final, *case.sequences, dh, ndb, *initial)

    close("dh", dh[case.used].mT, case.backward["dh"])
    close("db", -ndb[case.used], case.backward["db"])
    if initial:
        expected = chunk_kda_backward_golden(case.d_o, case.d_final_state, **case.call)["initial_state"]
        close("d_initial_state", initial[0], expected)


def check_prepare(case: Case) -> None:
    call = case.call
    gate, bounded = call.get("use_gate_in_kernel", False), call.get("lower_bound") is not None
    kernel = build(
        prepare, **case.common, H=case.H, g_dtype="float32", beta_dtype="float32",
        use_qk_l2norm=call.get("use_qk_l2norm_in_kernel", False), use_gate=gate, bounded_gate=bounded,
        use_beta_sigmoid=call.get("use_beta_sigmoid_in_kernel", False),
        allow_neg_eigval=call.get("allow_neg_eigval", False),
    )  # fmt: skip
    heads = (case.B, case.T, case.HV)
    sizes = {"dv": [case.V], "dq": [case.K], "dk": [case.K], "dg": [case.K], "dbeta": []}
    out = {name: poison(*heads, *sizes[name]) for name in PER_TOKEN}
    dgate = poison(case.entries, case.HV, 2, case.K)
    kernel(
        *(call[name].contiguous() for name in ("q", "k", "v", "g", "beta")),
        *([call["A_log"], call["dt_bias"]] if gate else []), *([call["lower_bound"]] if bounded else []),
        call.get("scale", case.K**-0.5), *case.owners, case.d_o,
        case.placed(case.forward["h"].mT), case.placed(case.backward["dh"].mT),
        case.placed(case.forward["v_new"]), case.placed(-case.backward["db"]),
        *(out[name] for name in ("dq", "dk", "dv", "dg", "dbeta")), *([dgate] if gate else []),
    )  # fmt: skip

    for name, x in out.items():
        by_token = case.backward[name].transpose(1, 2).flatten(0, 1)[case.rows]
        close(name, x.flatten(0, 1)[case.tokens], by_token)
        assert x.flatten(0, 1)[case.padding].isnan().all(), f"{name}: a store went outside of all sequences"
    if gate:
        close("ddt_bias", dgate[case.used, :, 0], case.backward["ddt_bias"])
        close("dA_log", dgate[case.used, :, 1].sum(-1), case.backward["dA_log"])
        assert not dgate[case.owner == UNUSED].any(), "the sums over all entries count those without a chunk as 0"


def close(name: str, actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape, name
    if expected.numel():
        error, largest = (actual.double() - expected).abs().max(), expected.abs().max()
        assert error <= TOLERANCE * max(largest, FLOOR.get(name, 1e-30)), (
            f"{name}: off by {error:.2e}, largest {largest:.2e}"
        )


def check(case: Case) -> None:
    check_carry(case)
    check_prepare(case)


def stable(*sizes: int, **options: Any) -> dict[str, Any]:
    return inputs.stable(*sizes, dtype=torch.float32, **options)


def raw(*sizes: int, **options: Any) -> dict[str, Any]:
    return inputs.raw(*sizes, dtype=torch.float32, **options)


@pytest.mark.parametrize("gate", ["logsigmoid", -1.5, -5.0, 0.0, -math.inf, "half_1000", "mixed"])
def test_gates(gate: str | float) -> None:
    check(Case(stable(2, 150, 1, 64, HV=2, gate=gate, initial_state=True)))


@pytest.mark.parametrize("T", [1, 15, 63, 64, 65, 128])
def test_tails(T: int) -> None:
    check(Case(stable(2, T, 1, 64, HV=2, initial_state=True, seed=T)))


def test_near_identical_keys() -> None:
    check(Case(inputs.collinear(2, 150, 1, 64, HV=2, dtype=torch.float32, initial_state=True)))


@pytest.mark.parametrize(("initial", "final"), [(False, False), (True, False), (False, True)])
def test_carry_without_one_of_the_states(initial: bool, final: bool) -> None:
    check_carry(Case(stable(2, 150, 1, 64, HV=2, initial_state=initial), d_final_state=final))


LENGTHS = [70, 0, 130, 64, 1, 0]
PADDED = (1, sum(LENGTHS) + 75)


def packed(call: dict[str, Any], *, long: bool) -> dict[str, Any]:
    """With padding before the first sequence as well, and cu_seqlens of 8 bytes or 4; every seventh gate saturated."""
    call["g"][:, ::7] *= 60.0
    call["cu_seqlens"] = (call["cu_seqlens"] + 5).to(torch.int64 if long else torch.int32)
    return call


@pytest.mark.parametrize("A_log", [0.0, 200.0])
def test_bounded_gate_packed_K_above_V(A_log: float) -> None:
    """With an A_log of 200, the rate is infinite in float32."""
    options = {"lengths": LENGTHS, "lower_bound": -5.0, "allow_neg_eigval": True}
    call = packed(raw(*PADDED, 1, 128, 64, HV=2, initial_state=True, **options), long=True)
    check(Case(call | {"A_log": call["A_log"] + A_log}))


@pytest.mark.parametrize("A_log", [0.0, 200.0])
def test_softplus_gate_packed_V_above_K_state_K_first(A_log: float) -> None:
    options = {"lengths": LENGTHS, "state_v_first": False}
    call = packed(raw(*PADDED, 1, 64, 128, initial_state=True, **options), long=False)
    if A_log:
        call |= {"A_log": call["A_log"] + A_log, "g": call["g"].clamp(max=2.0) - 300.0}
    case = Case(call)
    check_carry(case, block_V=128)
    check_prepare(case)


def test_plan_clears_the_gradients_of_padding_and_no_others() -> None:
    case = Case(packed(stable(*PADDED, 1, 64, 128, HV=2, lengths=LENGTHS), long=True))
    owner, order = torch.full((case.entries,), 99, dtype=torch.int32), torch.full((case.N,), 99, dtype=torch.int32)
    heads = (1, case.T, 2)
    gradients = [poison(*heads, 128), *(poison(*heads, 64) for _ in range(3)), poison(*heads)]
    types = {"dtype": "float32", "g_dtype": "float32", "beta_dtype": "float32", "cu_dtype": "int64"}
    build(plan, HV=2, V=128, K=64, **types)(case.call["cu_seqlens"], owner, order, *gradients)
    assert owner.equal(case.owner) and order.equal(case.order)
    for x in gradients:
        assert x[0, case.padding].eq(0).all() and x[0, ~case.padding].isnan().all()
