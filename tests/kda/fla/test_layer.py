"""The layer with FLA's arguments, names, mask and cache: held to FLA's formulas over the golden."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kda.fla import KimiDeltaAttention
from kda.golden import recurrent_kda_golden

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"hidden_size": 32, "expand_v": 2, "head_dim": 8, "num_heads": 2, "num_v_heads": 4}


class TheirLayer(nn.Module):
    """FLA's parameters by FLA's names, and what its layer computes, in fp64."""

    def __init__(self, lower_bound: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.allow_neg_eigval, self.lower_bound, self.layer_idx = True, lower_bound, 1
        self.q_proj, self.k_proj = nn.Linear(32, 16, bias=False), nn.Linear(32, 16, bias=False)
        self.v_proj, self.b_proj = nn.Linear(32, 64, bias=False), nn.Linear(32, 4, bias=False)
        for name, channels in (("q", 16), ("k", 16), ("v", 64)):
            setattr(self, f"{name}_conv1d", nn.Conv1d(channels, channels, 4, groups=channels, bias=False))
        self.f_proj = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Linear(16, 32, bias=False))
        self.g_proj = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Linear(16, 64))
        self.A_log, self.dt_bias = nn.Parameter(torch.rand(4)), nn.Parameter(torch.randn(32))
        self.o_norm, self.o_proj = nn.RMSNorm(16, eps=1e-3), nn.Linear(64, 32, bias=False)
        nn.init.normal_(self.o_norm.weight)

    def convolved(self, name: str, x: Tensor) -> Tensor:
        padded = F.pad(getattr(self, f"{name}_proj")(x).mT, (3, 0))
        return F.silu(getattr(self, f"{name}_conv1d")(padded)).mT

    def forward(self, x: Tensor) -> Tensor:
        o, _ = recurrent_kda_golden(
            *(self.convolved(name, x).unflatten(-1, (-1, D)) for name, D in (("q", 8), ("k", 8), ("v", 16))),
            self.f_proj(x).unflatten(-1, (4, 8)), self.b_proj(x), use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, A_log=self.A_log, dt_bias=self.dt_bias,
            lower_bound=self.lower_bound,
        )  # fmt: skip
        gate = self.g_proj(x).unflatten(-1, (4, 16)).sigmoid()
        return self.o_proj((self.o_norm(o.float()) * gate).flatten(2))


class Cache(list):
    """The part of FLA's caches that layers use."""

    def update(self, *, layer_idx: int, offset: int, **states: Any) -> None:
        while len(self) <= layer_idx:
            self.append({"recurrent_state": None, "conv_state": None})
        self[layer_idx] = states


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@torch.no_grad()
def test_their_weights_make_their_outputs(lower_bound: float | None) -> None:
    theirs = TheirLayer(lower_bound)
    ours, x = KimiDeltaAttention.from_fla(theirs.eval()), torch.randn(2, 70, 32)
    y, attentions, cache = ours(x)
    torch.testing.assert_close(y, theirs(x), rtol=1e-4, atol=1e-5)
    assert attentions is None and cache is None and not ours.training
    again = KimiDeltaAttention.from_fla(ours)
    assert torch.equal(again(x)[0], y)


@torch.no_grad()
def test_a_models_cache() -> None:
    ours, x, cache = KimiDeltaAttention.from_fla(TheirLayer()), torch.randn(2, 30, 32), Cache()
    expected = ours(x)[0]
    first, _, returned = ours(x[:, :25], past_key_values=cache, use_cache=True)
    rest = [ours(x[:, t : t + 1], past_key_values=cache, use_cache=True)[0] for t in range(25, 30)]
    torch.testing.assert_close(torch.cat([first, *rest], 1), expected, rtol=1e-4, atol=1e-5)
    assert returned is cache and len(cache) == 2
    before = cache[1]["recurrent_state"]
    ours(x[:, :1], past_key_values=cache)
    assert cache[1]["recurrent_state"] is before, "without use_cache it is only read"
    ours.layer_idx = None
    with pytest.raises(ValueError, match="layer_idx: expected a number"):
        ours(x, past_key_values=cache)


@torch.no_grad()
def test_a_models_mask() -> None:
    """Of a padded batch, with columns for what is in the cache already."""
    ours, x, cache = KimiDeltaAttention.from_fla(TheirLayer()), torch.randn(2, 12, 32), Cache()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    y = ours(x[:, :11], mask[:, :11], cache, use_cache=True)[0]
    last = ours(x[:, 11:], mask, cache, use_cache=True)[0]
    alone = ours(x[1:, 5:])[0]
    torch.testing.assert_close(torch.cat([y[1:, 5:], last[1:]], 1), alone, rtol=1e-4, atol=1e-5)
    packed = ours(x[:1], mask, cu_seqlens=torch.tensor([0, 7, 12]))[0]
    torch.testing.assert_close(packed[:, 7:], ours(x[:1, 7:])[0], rtol=1e-4, atol=1e-5)


def test_names_of_both() -> None:
    """FLA's names load into a layer inside of a model, and its bias is not lost."""
    model = nn.Sequential(KimiDeltaAttention(**SIZES, allow_neg_eigval=True))
    theirs = TheirLayer()
    model.load_state_dict({f"0.{name}": x for name, x in theirs.state_dict().items()})
    assert torch.equal(model[0].g_b_proj.bias, theirs.g_proj[1].bias)
    assert torch.equal(model[0].f_a_proj.weight, theirs.f_proj[0].weight)


@pytest.mark.parametrize("options, message", [
    ({"use_short_conv": False}, "expected use_short_conv=True and conv_bias=False, got False and False"),
    ({"conv_bias": True}, "expected use_short_conv=True and conv_bias=False, got True and True"),
    ({"expand_v": 1.3}, "expand_v: expected a whole number of value channels, got 10.4"),
])  # fmt: skip
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KimiDeltaAttention(**SIZES | options)


def test_a_layer_with_another_convolution_is_refused() -> None:
    theirs = TheirLayer()
    theirs.q_conv1d = nn.Conv1d(16, 16, 4, groups=16)
    with pytest.raises(ValueError, match="conv_bias=False"):
        KimiDeltaAttention.from_fla(theirs)
