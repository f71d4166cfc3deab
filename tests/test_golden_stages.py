"""The golden's stages against their definitions; and stages broken on purpose, which the checks must see."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from kda.golden import (
    STAGES,
    __main__,
    activation,
    chunk_kda_golden,
    chunk_kda_stages,
    inputs,
    recurrent_kda_golden,
    rel_rmse,
    stages,
)

LENGTHS = [64, 1, 0, 130, 37, 0, 15]


@pytest.fixture(scope="module")
def table() -> tuple[dict[str, Any], dict[str, Tensor]]:
    call = inputs.stable(1, sum(LENGTHS), 2, 32, 16, 4, lengths=LENGTHS, initial_state=True)
    return call, chunk_kda_stages(**call)


def test_stage_tables_have_their_shapes_and_zero_rows(table: tuple[dict[str, Any], dict[str, Tensor]]) -> None:
    call, t = table
    NC, HV, C, K, V = sum(-(-n // 64) for n in LENGTHS), 4, 64, 32, 16
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
        a = stages.m1(*map(lead, (q, k, g, beta)), activation.Activation())
        b = stages.m2(a.q, a.k, a.beta, a.G)
        c = stages.m3(a.q, a.k, lead(v), a.beta, a.G, b.Ainv)
        assert b.Akk.shape == (*lead(q).shape[:-1], 5) and c.decay.shape == (*lead(q).shape[:-2], 8)
        assert c.u.dtype == torch.float32 and a.G.dtype == torch.float64
    whole = stages.m2(*stages.m1(q, k, g, beta, activation.Activation()))
    assert torch.equal(whole.Akk[0, 0], b.Akk)


def test_rows_past_the_end_are_inert_whatever_they_hold() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, 1, 8, 4, generator=generator).double() for _ in range(4))
    beta, S = torch.randn(1, 1, 8, generator=generator).double(), torch.zeros(1, 4, 4).double()
    act = activation.Activation(use_gate_in_kernel=True, lower_bound=-1.0, use_beta_sigmoid_in_kernel=True)

    def final_state(rows: int, valid: Tensor | None) -> Tensor:
        a = stages.m1(q[..., :rows, :], k[..., :rows, :], g[..., :rows, :], beta[..., :rows], act, valid)
        b = stages.m2(a.q, a.k, a.beta, a.G)
        c = stages.m3(a.q, a.k, v[..., :rows, :], a.beta, a.G, b.Ainv)
        return stages.m4(b.Aqk, c.qg, c.kg, c.decay, c.w, c.u, S).final_state

    torch.testing.assert_close(final_state(8, torch.arange(8) < 5), final_state(5, None), rtol=1e-12, atol=0)
    assert not torch.allclose(final_state(8, None), final_state(5, None), rtol=1e-3)


# Broken on purpose.


def without_right_shift(Aqk: Tensor, qg: Tensor, kg: Tensor, decay: Tensor, w: Tensor, u: Tensor, S: Tensor) -> Any:
    """The state takes in the chunk before the chunk reads it."""
    whole = m4(Aqk, qg, kg, decay, w, u, S)
    after = torch.cat([whole.h[1:], whole.final_state[None]])
    return whole._replace(o=qg @ after + Aqk @ whole.v_new)


def without_tail_zeros(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, act: Any, valid: Tensor | None = None) -> Any:
    return m1(q, k, g, beta, act)


def without_beta(q: Tensor, k: Tensor, beta: Tensor, G: Tensor) -> Any:
    return m2(q, k, torch.ones_like(beta), G)


def without_inverse(q: Tensor, k: Tensor, beta: Tensor, G: Tensor) -> Any:
    whole = m2(q, k, beta, G)
    return whole._replace(Ainv=torch.eye(k.shape[-2], dtype=k.dtype).expand_as(whole.Ainv))


def clamped_at_80(q: Tensor, k: Tensor, beta: Tensor, G: Tensor) -> Any:
    """One pivot for the whole chunk, its growing factor cut off where fp32 would overflow."""
    G = G - G[..., :1, :]
    near, far = G.exp().to(k.dtype), (-G).clamp(max=80).exp().to(k.dtype)
    Akk = ((beta.unsqueeze(-1) * k * near) @ (k * far).mT).tril(-1)
    eye = torch.eye(k.shape[-2], dtype=k.dtype)
    return stages.M2(Akk, ((q * near) @ (k * far).mT).tril(), torch.linalg.inv(eye + Akk))


m1, m2, m4 = stages.m1, stages.m2, stages.m4


@pytest.mark.parametrize(
    ("stage", "broken", "red"),
    [
        ("m4", without_right_shift, "fixed length, float32, o"),
        ("m1", without_tail_zeros, "varlen, sequence of 37, final state"),
        ("m2", without_beta, "fixed length, bfloat16, o"),
        ("m2", without_inverse, "varlen, sequence of 130, final state"),
    ],
)
def test_self_check_sees_a_broken_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stage: str, broken: Any, red: str
) -> None:
    monkeypatch.setattr(stages, stage, broken)
    assert __main__.main() == 1
    assert f"{red}: FAILED" in capsys.readouterr().out


def test_clamp_at_80_is_right_only_until_its_exponents_reach_80(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "m2", clamped_at_80)
    for gate, low, high in ((-1.2, 0.0, 1e-10), (-1.5, 0.1, 1.0), (-5.0, 0.5, 1.0)):
        call = inputs.stable(1, 128, 1, 64, gate=gate)
        assert low <= rel_rmse(chunk_kda_golden(**call)[0], recurrent_kda_golden(**call)[0]) <= high


def test_unbounded_gate_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    call = inputs.stable(1, 70, 1, 16, gate="mixed")
    monkeypatch.setattr(activation, "MIN_LOG_DECAY", -math.inf)
    assert chunk_kda_golden(**call)[0].isnan().any()


def test_fp32_cumsum_loses_small_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    call = inputs.stable(1, 128, 1, 64, gate="half_1000")
    monkeypatch.setattr(stages, "m2", lambda q, k, beta, G: m2(q, k, beta, G.float()))
    assert rel_rmse(chunk_kda_golden(**call, dtype=torch.float32)[0], recurrent_kda_golden(**call)[0]) > 1e-5


def test_module_runs_and_reports() -> None:
    done = subprocess.run([sys.executable, "-m", "kda.golden"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": ok: ") == 2 * (3 + len(__main__.LENGTHS))
