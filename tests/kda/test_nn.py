"""The layer: held to the paper's formulas written out over the golden, to itself in pieces, and to its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kda.nn
from kda.convolution import ShortConvolution
from kda.golden import recurrent_kda_golden, rel_rmse
from kda.nn import DECODE_TOKENS, KimiDeltaAttention

HIDDEN = 48


pytestmark = pytest.mark.usefixtures("one_thread")


def layer(seed: int = 0, **options: object) -> KimiDeltaAttention:
    torch.manual_seed(seed)
    return KimiDeltaAttention(HIDDEN, 2, **{"head_dim": 16, "backend": "torch", **options})


def text(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor, limit: float = 1e-5) -> None:
    assert actual.shape == expected.shape
    assert rel_rmse(actual, expected) <= limit


def by_the_paper(m: KimiDeltaAttention, x: Tensor) -> Tensor:
    """Section 4 of arXiv:2510.26692 in fp64, activations and all outside the operator."""
    m = m.double()
    x = x.double()

    def mixed(projection: torch.nn.Linear, conv: ShortConvolution, heads: int) -> Tensor:
        y = projection(x).transpose(1, 2)
        y = F.conv1d(F.pad(y, (conv.kernel_size[0] - 1, 0)), conv.weight, groups=y.shape[1])
        return F.silu(y.transpose(1, 2)).unflatten(-1, (heads, -1))

    q, k = (mixed(p, c, m.num_heads) for p, c in ((m.q_proj, m.q_conv1d), (m.k_proj, m.k_conv1d)))
    v = mixed(m.v_proj, m.v_conv1d, m.num_v_heads)
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    rate, A = (m.f_b_proj(m.f_a_proj(x)) + m.dt_bias).unflatten(-1, (m.num_v_heads, -1)), m.A_log.exp()[:, None]
    g = -A * F.softplus(rate) if m.lower_bound is None else m.lower_bound * torch.sigmoid(A * rate)
    o, _ = recurrent_kda_golden(q, k, v, g, m.b_proj(x).sigmoid())
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * m.o_norm.weight
    return m.o_proj(o.flatten(2) * m.g_b_proj(m.g_a_proj(x)).sigmoid())


@pytest.mark.parametrize(
    "options",
    [{}, {"lower_bound": -5.0}, {"num_v_heads": 4, "v_head_dim": 8}, {"conv_size": 1}],
    ids=["plain", "lower_bound", "gva_k_ne_v", "no_convolution"],
)
def test_computes_the_papers_formulas(options: dict[str, object]) -> None:
    m, x = layer(**options), text(2, 70)
    with torch.no_grad():
        torch.nn.init.uniform_(m.o_norm.weight, 0.5, 1.5)
        y, _ = m(x)
        assert_close(y, by_the_paper(m, x))


@pytest.mark.parametrize("T", [0, 1, 63, 64, 65])
def test_shapes(T: int) -> None:
    m = layer(num_v_heads=4, v_head_dim=8)
    y, none = m(text(3, T))
    assert y.shape == (3, T, HIDDEN) and none is None
    _, cache = m(text(3, T), output_cache=True)
    assert [tuple(t.shape) for t in cache.conv] == [(3, 3, 32)] * 3
    assert cache.state.shape == (3, 4, 8, 16) and cache.state.dtype == torch.float32


@pytest.mark.parametrize("ends", [[1], [1, 2, 3], [64], [65, 66, 130], [149], list(range(100, 150)), [20, 20, 90]])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@torch.no_grad()
def test_pieces_with_a_cache_equal_one_run(ends: list[int], lower_bound: float | None) -> None:
    m, x = layer(lower_bound=lower_bound), text(2, 150)
    whole, whole_cache = m(x, output_cache=True)
    cache, ys = None, []
    for start, end in zip([0, *ends], [*ends, 150], strict=True):
        y, cache = m(x[:, start:end], cache, output_cache=True)
        ys.append(y)
    assert_close(torch.cat(ys, 1), whole)
    assert_close(cache.state, whole_cache.state)
    for tail, whole_tail in zip(cache.conv, whole_cache.conv, strict=True):
        assert_close(tail, whole_tail)


@torch.no_grad()
def test_a_few_tokens_behind_a_cache_decode_and_all_else_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("chunk_kda", "fused_recurrent_kda"):
        op = getattr(kda.nn, name)
        monkeypatch.setattr(kda.nn, name, lambda *a, _op=op, _name=name, **kw: called.append(_name) or _op(*a, **kw))
    m, x = layer(), text(1, 40)
    _, cache = m(x[:, :1], output_cache=True)
    m(x[:, :DECODE_TOKENS], cache)
    m(x[:, : DECODE_TOKENS + 1], cache)
    two = torch.tensor([0, 1, 2])
    _, packed = m(x[:, :2], cu_seqlens=two, output_cache=True)
    m(x[:, 2:4], packed, cu_seqlens=two)
    m(x[:, 2:6], packed, cu_seqlens=2 * two)
    chunk, decode = "chunk_kda", "fused_recurrent_kda"
    assert called == [chunk, decode, chunk, chunk, decode, chunk]


@torch.no_grad()
def test_a_cache_can_be_continued_twice() -> None:
    m, x = layer(), text(2, 12)
    _, cache = m(x[:, :8], output_cache=True)
    first, _ = m(x[:, 8:], cache, output_cache=True)
    second, _ = m(x[:, 8:], cache, output_cache=True)
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@torch.no_grad()
def test_packed_sequences_equal_each_alone(dtype: torch.dtype) -> None:
    m, lengths, more = layer(), [0, 70, 1, 0, 2, 65], [3, 1, 0, 0, 90, 2]
    packed_cache, alone_caches = None, [None] * len(lengths)
    for call, pieces in enumerate((lengths, more, [1] * 6)):
        cu = torch.tensor([0, *pieces]).cumsum(0).to(dtype)
        x = text(1, int(cu[-1]) + 5, seed=call)
        x[:, int(cu[-1]) :] = float("nan")  # padding
        y, packed_cache = m(x, packed_cache, cu_seqlens=cu, output_cache=True)
        for n, alone in enumerate(alone_caches):
            part = slice(int(cu[n]), int(cu[n + 1]))
            expected, alone_caches[n] = m(x[:, part], alone, output_cache=True)
            torch.testing.assert_close(y[:, part], expected, rtol=1e-4, atol=1e-6)
            for tail, expected_tail in zip(packed_cache.conv, alone_caches[n].conv, strict=True):
                torch.testing.assert_close(tail[n : n + 1], expected_tail)
            torch.testing.assert_close(packed_cache.state[n : n + 1], alone_caches[n].state, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_convolution_reaches_its_taps_back_and_never_ahead() -> None:
    conv, x = ShortConvolution(5, 4), torch.zeros(1, 12, 5)
    x[0, 6] = 1.0
    y, tail = conv(x)
    touched = (y != 0).any(-1)[0].nonzero().flatten().tolist()
    assert touched == [6, 7, 8, 9]
    torch.testing.assert_close(y[0, 6:10], F.silu(conv.weight[:, 0].flip(1).T))
    assert torch.equal(tail, x[:, -3:])


@torch.no_grad()
def test_layer_is_causal() -> None:
    m, x = layer(), text(1, 80)
    y, _ = m(x)
    x[:, 40] += 1.0
    changed, _ = m(x)
    torch.testing.assert_close(changed[:, :40], y[:, :40])
    assert (changed[:, 40:] - y[:, 40:]).abs().amax(-1).min() > 1e-6


@torch.no_grad()
def test_one_seed_gives_the_same_bits() -> None:
    x = text(1, 90)
    first, second, other = (layer(seed)(x)[0] for seed in (3, 3, 4))
    assert torch.equal(first, second)
    assert not torch.allclose(first, other)


def test_initial_gates_lie_in_the_documented_ranges() -> None:
    m = layer(num_v_heads=64)
    A, rate = m.A_log.exp(), F.softplus(m.dt_bias)
    assert 1 <= A.min() < 3 and 14 < A.max() <= 16.001
    assert 0.00099 <= rate.min() < 0.002 and 0.05 < rate.max() <= 0.1001
    m = layer(num_v_heads=64, lower_bound=-5.0)
    share = torch.sigmoid(m.dt_bias)
    assert torch.all(m.A_log == 0)
    assert 0.00099 <= share.min() < 0.002 and 0.05 < share.max() <= 0.1001


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gradients_reach_every_parameter_and_the_cache(lower_bound: float | None) -> None:
    m, x = layer(lower_bound=lower_bound), text(2, 90)
    first = x[:, :70].clone().requires_grad_()
    _, cache = m(first, output_cache=True)
    for parameter in m.parameters():
        parameter.grad = None
    y, _ = m(x[:, 70:], cache)
    y.square().sum().backward()
    for name, parameter in m.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
    assert first.grad.abs().amax(-1).min() > 0  # only through the cache can it have come this far


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gradients_are_those_of_finite_differences(lower_bound: float | None) -> None:
    torch.manual_seed(0)
    m = KimiDeltaAttention(6, 1, 4, lower_bound=lower_bound, backend="torch").double()
    x = torch.randn(1, 5, 6, dtype=torch.float64, requires_grad=True)
    names, values = zip(*m.named_parameters(), strict=True)

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(m, dict(zip(names, values, strict=True)), (x,))[0]

    assert torch.autograd.gradcheck(run, (x, *values), fast_mode=True)


def test_trains() -> None:
    """It learns to recall the token before, which takes the convolution or the state."""
    m, x = layer(), text(2, 32)
    target = F.pad(x, (0, 0, 1, 0))[:, :-1]
    optimizer = torch.optim.Adam(m.parameters(), lr=4e-2)
    losses = []
    for _ in range(10):
        loss = F.mse_loss(m(x)[0], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@torch.no_grad()
def test_bfloat16_stays_near_float32() -> None:
    m, x = layer(), text(1, 80)
    expected, _ = m(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(m(x)[0], expected, limit=2e-2)
    m = m.to(torch.bfloat16)
    y, cache = m(x[:, :70].bfloat16(), output_cache=True)
    rest, _ = m(x[:, 70:].bfloat16(), cache)
    assert y.dtype == torch.bfloat16 and cache.state.dtype == torch.float32
    assert_close(torch.cat([y, rest], 1), expected, limit=2e-2)


def test_bad_arguments_are_named() -> None:
    m, x = layer(), text(2, 4)
    _, cache = m(x, output_cache=True)
    with pytest.raises(ValueError, match=r"x: expected \[B, T, hidden_size = 48\], got \[2, 4, 47\]"):
        m(x[..., 1:])
    with pytest.raises(ValueError, match="x: expected batch size 1 beside cu_seqlens"):
        m(x, cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="cache: expected N = 1 sequences as x, got a cache of 2"):
        m(x[:1], cache)
    with pytest.raises(ValueError, match="num_v_heads: expected a multiple of num_heads = 2, got 3"):
        layer(num_v_heads=3)
    with pytest.raises(ValueError, match="expected positive sizes"):
        layer(conv_size=0)
    with pytest.raises(ValueError, match="lower_bound"):
        layer(lower_bound=-6.0)(x)
    with pytest.raises(ValueError, match="backend"):
        layer(backend="nosuch")(x)
