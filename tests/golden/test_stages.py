"""The golden's stages against their definitions, and what goes wrong where their arithmetic is taken lightly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from broken_stages import CLAMPED_AT_80, SCORES_IN_FP32
from golden_calls import RAGGED
from torch import Tensor

from kda.golden import STAGES, chunk_kda_golden, chunk_kda_stages, inputs, recurrent_kda_golden, rel_rmse, stages
from kda.golden.activation import Activation, activate
from kda.golden.carry import carry
from kda.golden.inverse import inverse
from kda.golden.scores import scores
from kda.golden.wy import wy


@pytest.fixture(scope="module")
def table() -> tuple[dict[str, Any], dict[str, Tensor]]:
    call = inputs.stable(1, sum(RAGGED), 2, 32, 16, 4, lengths=RAGGED, initial_state=True)
    return call, chunk_kda_stages(**call)


def test_stage_tables_have_their_shapes_and_zero_rows(table: tuple[dict[str, Any], dict[str, Tensor]]) -> None:
    call, t = table
    NC, HV, C, K, V = sum(-(-n // 64) for n in RAGGED), 4, 64, 32, 16
    assert list(t) == [name for names in STAGES.values() for name in names]
    for name, shape in {"G": (C, K), "q": (C, K), "beta": (C,), "Akk": (C, C), "u": (C, V), "h": (K, V)}.items():
        assert t[name].shape == (NC, HV, *shape)
    assert t["decay"].shape == (NC, HV, K)
    tail = slice(130 - 128, 64)  # of the third chunk of the sequence of 130, after 64 and 1
    for name in ("q", "k", "beta", "Akk", "Aqk", "qg", "kg", "w", "u", "v_new"):
        assert t[name][4, :, tail].eq(0).all() and t[name][4, :, :2].ne(0).any(), name
    assert t["G"][4, :, tail].eq(t["G"][4, :, 1:2]).all()
    assert torch.equal(t["G"][0, :, 5], call["g"][0, :6].double().sum(0))


def test_stages_are_their_definitions(table: tuple[dict[str, Any], dict[str, Tensor]]) -> None:
    call, t = table
    c, h, i, j = 3, 2, 40, 17  # the second chunk of the sequence that starts at token 65
    at = 65 + 64 + torch.arange(64)
    q, k = (call[name][0, at, h // 2].double() for name in ("q", "k"))
    v, g, beta = (call[name][0, at, h].double() for name in ("v", "g", "beta"))
    G, S = g.cumsum(0), t["h"][c, h]
    pair = k[j] * torch.exp(G[i] - G[j])
    x = {name: tensor[c, h] for name, tensor in t.items()}
    close = lambda a, e: torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-14)  # noqa: E731
    close(x["G"], G)
    close(x["q"], q * 32**-0.5)
    close(x["Akk"][i, j], beta[i] * k[i] @ pair)
    close(x["Aqk"][i, j], q[i] * 32**-0.5 @ pair)
    close(x["Aqk"][i, i], q[i] * 32**-0.5 @ k[i])
    assert x["Akk"].triu().eq(0).all() and x["Aqk"].triu(1).eq(0).all()
    close(x["Ainv"] @ (torch.eye(64) + x["Akk"]), torch.eye(64).double())
    close(x["qg"], q * 32**-0.5 * G.exp())
    close(x["kg"], k * torch.exp(G[-1] - G))
    close(x["decay"], G[-1].exp())
    close((torch.eye(64) + x["Akk"]) @ x["w"], beta[:, None] * k * G.exp())
    close((torch.eye(64) + x["Akk"]) @ x["u"], beta[:, None] * v)
    close(x["v_new"], x["u"] - x["w"] @ S)
    prefix = {name: call[name][:, 65 : 65 + 64] for name in ("q", "k", "v", "g", "beta")}
    entered = recurrent_kda_golden(**prefix, initial_state=call["initial_state"][3:4], output_final_state=True)[1]
    close(S, entered[0, h].T)


def test_stages_take_any_leading_dimensions_and_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 8, generator=generator) for _ in range(3))
    g, beta = -torch.rand(2, 3, 5, 8, generator=generator), torch.rand(2, 3, 5, generator=generator)
    for lead in (lambda x: x, lambda x: x[:, 0], lambda x: x[0, 0]):
        m1 = activate(*map(lead, (q, k, g, beta)), Activation())
        m2 = scores(*m1)
        m3 = wy(m1.q, m1.k, lead(v), m1.beta, m1.G, inverse(m2.Akk))
        assert m2.Akk.shape == (*lead(q).shape[:-1], 5) and m3.decay.shape == (*lead(q).shape[:-2], 8)
        assert m3.u.dtype == torch.float32 and m1.G.dtype == torch.float64
    whole = scores(*activate(q, k, g, beta, Activation()))
    assert torch.equal(whole.Akk[0, 0], m2.Akk)


def test_rows_past_the_end_are_inert_whatever_they_hold() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, 1, 8, 4, generator=generator).double() for _ in range(4))
    beta, S = torch.randn(1, 1, 8, generator=generator).double(), torch.zeros(1, 4, 4).double()
    act = Activation(use_gate_in_kernel=True, lower_bound=-1.0, use_beta_sigmoid_in_kernel=True)

    def final_state(rows: int, valid: Tensor | None) -> Tensor:
        m1 = activate(q[..., :rows, :], k[..., :rows, :], g[..., :rows, :], beta[..., :rows], act, valid)
        m2 = scores(*m1)
        m3 = wy(m1.q, m1.k, v[..., :rows, :], m1.beta, m1.G, inverse(m2.Akk))
        return carry(m2.Aqk, *m3, S).final_state

    torch.testing.assert_close(final_state(8, torch.arange(8) < 5), final_state(5, None), rtol=1e-12, atol=0)
    assert not torch.allclose(final_state(8, None), final_state(5, None), rtol=1e-3)


def test_clamp_at_80_is_right_only_until_its_exponents_reach_80(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, *CLAMPED_AT_80)
    for gate, low, high in ((-1.2, 0.0, 1e-10), (-1.5, 0.1, 1.0), (-5.0, 0.5, 1.0)):
        call = inputs.stable(1, 128, 1, 64, gate=gate)
        assert low <= rel_rmse(chunk_kda_golden(**call)[0], recurrent_kda_golden(**call)[0]) <= high


def test_fp32_cumsum_loses_small_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    call = inputs.stable(1, 128, 1, 64, gate="half_1000")
    monkeypatch.setattr(stages, *SCORES_IN_FP32)
    assert rel_rmse(chunk_kda_golden(**call, dtype=torch.float32)[0], recurrent_kda_golden(**call)[0]) > 1e-5
