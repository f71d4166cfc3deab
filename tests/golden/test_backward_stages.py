"""Each stage of the backward pass by itself: its tensors are autograd's gradients, through its formulas alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from golden_calls import RAGGED, alone, ragged
from torch import Tensor

from kda.golden import (
    BACKWARD_STAGES,
    chunk_kda_backward_golden,
    chunk_kda_backward_stages,
    chunk_kda_stages,
    inputs,
)
from kda.golden.activation import Activation, activate
from kda.golden.backward.activation import activate_backward
from kda.golden.backward.carry import carry_backward
from kda.golden.backward.scores import scores_backward
from kda.golden.backward.wy import wy_backward
from kda.golden.inverse import inverse

pytestmark = pytest.mark.usefixtures("one_thread")

N, C, K, V = 3, 12, 8, 6
Tables = tuple[dict[str, Any], Tensor, Tensor, dict[str, Tensor]]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)


def test_carry_and_wy_are_gradients_through_the_carry() -> None:
    """Every tensor that the chunks are carried on with is a leaf; v_new and the states get a zero that is one."""
    eye = torch.eye(C).double()
    Aqk, Akk = leaf(randn(N, C, C).tril()), leaf(0.3 * randn(N, C, C, seed=1).tril(-1))
    qg, kg, kb, decay = (leaf(randn(N, C, K, seed=s)) for s in (2, 3, 4, 5))
    decay = leaf(torch.rand(N, K, generator=torch.Generator().manual_seed(0)).double())
    beta_v, S_0 = leaf(randn(N, C, V)), leaf(randn(K, V))
    at_v_new, at_state = leaf(torch.zeros(N, C, V).double()), leaf(torch.zeros(N, K, V).double())
    do, d_final = randn(N, C, V, seed=7), randn(K, V, seed=7)

    S, loss, h, v_new = S_0, torch.zeros(()).double(), [], []
    for c in range(N):
        h.append(S.detach())
        x = torch.linalg.solve_triangular(eye + Akk[c], beta_v[c] - kb[c] @ S, upper=False) + at_v_new[c]
        loss = loss + ((qg[c] @ S + Aqk[c] @ x) * do[c]).sum()
        S = decay[c].unsqueeze(-1) * S + kg[c].mT @ x + at_state[c]
        v_new.append(x.detach())
    (loss + (S * d_final).sum()).backward()

    with torch.no_grad():
        Ainv = inverse(Akk)
        dm4 = carry_backward(Aqk, Ainv, qg, kg, decay, Ainv @ kb, do, d_final)
        dm3 = wy_backward(torch.stack(h), torch.stack(v_new), do, dm4.db, dm4.dh)
    close(dm4.dv_new, at_v_new.grad)
    close(dm4.db, beta_v.grad)
    close(dm4.dh, at_state.grad)
    close(dm4.d_initial_state, S_0.grad)
    close(dm3.dAqk, Aqk.grad.tril())
    close(dm3.dAkk, Akk.grad.tril(-1))
    for name, x in {"dqg": qg, "dkb": kb, "dkg": kg, "ddecay": decay}.items():
        close(getattr(dm3, name), x.grad)


@pytest.mark.parametrize("lead", [(), (N,), (2, N)])
def test_scores_are_gradients_through_scores_and_decays(lead: tuple[int, ...]) -> None:
    q, k, v = (leaf(randn(*lead, C, size, seed=s)) for s, size in ((0, K), (1, K), (2, V)))
    beta = leaf(torch.rand(*lead, C, generator=torch.Generator().manual_seed(0)).double())
    g = leaf(-randn(*lead, C, K, seed=3).abs() * 3)
    dAqk, dAkk = randn(*lead, C, C).tril(), randn(*lead, C, C, seed=1).tril(-1)
    dqg, dkb, dkg = (randn(*lead, C, K, seed=s) for s in (4, 5, 6))
    ddecay, db = randn(*lead, K), randn(*lead, C, V)

    G = g.cumsum(-2)
    lower = torch.ones(C, C).tril()[..., None] == 1
    E = (G.unsqueeze(-2) - G.unsqueeze(-3)).where(lower, -torch.inf).exp()
    Aqk = torch.einsum("...ic,...jc,...ijc->...ij", q, k, E)
    Akk = torch.einsum("...i,...ic,...jc,...ijc->...ij", beta, k, k, E).tril(-1)
    given = {"qg": q * G.exp(), "kb": beta[..., None] * k * G.exp(), "kg": k * (G[..., -1:, :] - G).exp()}
    loss = (Aqk * dAqk).sum() + (Akk * dAkk).sum() + (G[..., -1, :].exp() * ddecay).sum()
    loss = loss + (beta[..., None] * v * db).sum()
    for x, dx in zip(given.values(), (dqg, dkb, dkg), strict=True):
        loss = loss + (x * dx).sum()
    loss.backward()

    with torch.no_grad():
        actual = scores_backward(q, k, beta, G, v, db, dAqk, dAkk, dqg, dkb, dkg, ddecay)
    for gradient, x in zip(actual, (q, k, beta, g, v), strict=True):
        close(gradient, x.grad)


@pytest.mark.parametrize(
    "flags",
    [
        {"scale": 0.3, "use_qk_l2norm_in_kernel": True},
        {"use_beta_sigmoid_in_kernel": True},
        {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
        {"use_gate_in_kernel": True},
        {"use_gate_in_kernel": True, "lower_bound": -2.0},
    ],
)
def test_activation_is_gradients_through_the_activation(flags: dict[str, Any]) -> None:
    q, k, g = (leaf(randn(N, 2, C, K, seed=s)) for s in range(3))
    beta = leaf(randn(N, 2, C))
    A_log, dt_bias = leaf(randn(2, 1, 1)), leaf(randn(2, 1, K))
    if not flags.get("use_gate_in_kernel"):
        g = leaf(-g.detach().abs())
    act = Activation(**{"A_log": A_log, "dt_bias": dt_bias} | flags)
    valid = torch.ones(N, 1, C) == 1
    valid[-1, :, C - 5 :] = False
    given = [randn(N, 2, C, K, seed=s) for s in (4, 5)]
    given += [randn(N, 2, C, seed=6), randn(N, 2, C, K, seed=7)]

    m1 = activate(q, k, g, beta, act, valid)
    of_token = torch.cat([m1.G[..., :1, :], m1.G.diff(dim=-2)], -2)
    sum((x * dx).sum() for x, dx in zip((m1.q, m1.k, m1.beta, of_token), given, strict=True)).backward()

    with torch.no_grad():
        dm1 = activate_backward(q, k, g, beta, act, *given, valid)
    for name, x in {"dq": q, "dk": k, "dg": g, "dbeta": beta}.items():
        close(getattr(dm1, name), x.grad)
    if act.use_gate_in_kernel:
        close(dm1.dA_log.sum(0), A_log.grad.view(2))
        close(dm1.ddt_bias.sum(0), dt_bias.grad.view(2, K))


def test_a_bounded_gate_that_is_nearly_saturated_keeps_its_small_gradient() -> None:
    """1 - sigmoid(x) rounds to 0 there, so autograd's own gradient would be 0."""
    x, d = torch.linspace(40, 60, C * K).double().view(C, K), randn(C, K)
    act = Activation(use_gate_in_kernel=True, lower_bound=-2.0)
    dm1 = activate_backward(*(randn(C, K) for _ in range(2)), x, randn(C), act, *(d, d, d[:, 0], d))
    torch.testing.assert_close(dm1.dg, -2 * (-x).exp() * d, rtol=1e-11, atol=0)


@pytest.fixture(scope="module")
def tables() -> Tables:
    """A call, the gradients it is given, and the golden's tables."""
    call = ragged(dtype=torch.float64)
    do, d_state = randn(*call["v"].shape), randn(*call["initial_state"].shape)
    return call, do, d_state, chunk_kda_backward_stages(do, d_state, **call)


def test_tables_have_their_shapes_and_zero_rows(tables: Tables) -> None:
    *_, t = tables
    NC, HV, C, K, V = sum(-(-n // 64) for n in RAGGED), 4, 64, 32, 16
    assert list(t) == [name for names in BACKWARD_STAGES.values() for name in names]
    shapes: dict[str, tuple[int, ...]] = {"dv_new": (C, V), "dh": (K, V), "dAqk": (C, C), "dqg": (C, K)}
    shapes |= {"ddecay": (K,), "dbeta": (C,), "dA_log": ()}
    for name, shape in shapes.items():
        assert t[name].shape == (NC, HV, *shape) and t[name].dtype == torch.float64
    tail = slice(130 - 128, 64)  # of the third chunk of the sequence of 130, after 64 and 1
    for name in set(t) - {"dh", "ddecay", "dA_log", "ddt_bias", "dg_activated"}:
        assert t[name][4, :, tail].eq(0).all() and t[name][4, :, :2].ne(0).any(), name
    assert t["dAqk"].triu(1).eq(0).all() and t["dAkk"].triu().eq(0).all()


def test_tables_are_what_the_gradients_are_made_of(tables: Tables) -> None:
    """dh at both ends of a sequence, and at a border where it can be cut; the sums over heads and chunks."""
    call, do, d_state, t = tables
    gradients = chunk_kda_backward_golden(do, d_state, **call)
    for name in ("A_log", "dt_bias"):
        close(t[f"d{name}"].sum(0).flatten(), gradients[name])
    n, first = 3, 65  # the sequence of 130 is in the chunks 2 to 4
    own = alone(call, n, first, 130)
    close(t["dh"][4].mT, d_state[n])
    rest = {name: x[:, 64:] if name in ("q", "k", "v", "g", "beta") else x for name, x in own.items()}
    rest["initial_state"] = chunk_kda_stages(**call)["h"][3].mT[None]
    part = chunk_kda_backward_golden(do[:, first + 64 : first + 130], d_state[n : n + 1], **rest)
    close(t["dh"][2].mT, part["initial_state"][0])
    chunk = t["dk"][3]  # [HV, C, K]; two value heads share a head
    close(chunk.unflatten(0, (2, 2)).sum(1).transpose(0, 1), gradients["k"][0, first + 64 : first + 128])
    close(t["dv"][3].transpose(0, 1), gradients["v"][0, first + 64 : first + 128])


@pytest.mark.parametrize("generator", [inputs.stable, inputs.raw])
def test_fp32_tables_are_near_fp64(generator: Callable[..., dict[str, Any]]) -> None:
    call = ragged(generator)
    do, d_state = randn(*call["v"].shape), randn(*call["initial_state"].shape)
    expected = chunk_kda_backward_stages(do, d_state, **call)
    for name, x in chunk_kda_backward_stages(do, d_state, **call, dtype=torch.float32).items():
        assert x.dtype == torch.float32 and (x - expected[name]).norm() <= 3e-6 * expected[name].norm(), name
