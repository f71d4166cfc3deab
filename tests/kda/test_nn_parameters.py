"""The layer's parameters and cache: initialised on any device, loaded, converted, exported; wrong ones are refused."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from kda.nn import KimiDeltaAttention, KimiDeltaCache

pytestmark = pytest.mark.usefixtures("one_thread")
GATE = ("A_log", "dt_bias")


def layer(**options: object) -> KimiDeltaAttention:
    torch.manual_seed(0)
    return KimiDeltaAttention(32, 2, 8, **options)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_made_on_meta_and_reset_part_by_part(lower_bound: float | None) -> None:
    """As FSDP does it: parameters get memory, then every module with `reset_parameters` fills its own."""
    with torch.device("meta"):
        m = KimiDeltaAttention(32, 2, 8, lower_bound=lower_bound)
    m.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in m.parameters():
            parameter.fill_(float("nan"))
    for module in m.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in m.parameters())
    like = layer(lower_bound=lower_bound)
    for name in GATE:
        assert abs(getattr(m, name).mean() - getattr(like, name).mean()) < 1.5
    assert m(torch.randn(1, 5, 32))[0].isfinite().all()


def test_device_and_dtype() -> None:
    m = layer(device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta for p in m.parameters())
    dtypes = {name: p.dtype for name, p in m.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == set(GATE)
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    assert layer(dtype=torch.float64).A_log.dtype == torch.float64


@pytest.mark.parametrize("convert", [lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.to("cpu", torch.bfloat16)])
def test_the_gate_stays_in_fp32(convert) -> None:
    m = layer()
    before = {name: getattr(m, name).detach().clone() for name in GATE}
    m(torch.randn(1, 3, 32))[0].sum().backward()
    convert(m)
    assert m.q_proj.weight.dtype in (torch.bfloat16, torch.float16)
    for name in GATE:
        parameter = getattr(m, name)
        assert torch.equal(parameter, before[name]) and parameter.dtype == parameter.grad.dtype == torch.float32
        assert parameter._no_weight_decay
    assert {id(p) for p in m.parameters() if getattr(p, "_no_weight_decay", False)} == {id(m.A_log), id(m.dt_bias)}
    assert m.double().A_log.dtype == torch.float64


def test_a_gate_in_bf16_is_read_in_fp32() -> None:
    """What sharding with mixed precision does to it."""
    m, x = layer(), torch.randn(1, 6, 32)
    rounded = {name: getattr(m, name).detach().bfloat16() for name in GATE}
    for name in GATE:
        getattr(m, name).data = rounded[name].float()
    expected, _ = m(x)
    for name in GATE:
        setattr(m, name, torch.nn.Parameter(rounded[name]))
    assert torch.equal(m(x)[0], expected)


def test_published_shapes_of_the_gate_load() -> None:
    m, other = layer(), KimiDeltaAttention(32, 2, 8)
    weights = m.state_dict()
    weights["A_log"], weights["dt_bias"] = weights["A_log"].view(1, 1, 2, 1), weights["dt_bias"].view(2, 8)
    other.load_state_dict(weights)
    assert all(torch.equal(a, b) for a, b in zip(m.parameters(), other.parameters(), strict=True))
    weights["A_log"] = torch.zeros(1, 1, 3, 1)
    with pytest.raises(RuntimeError, match="size mismatch for A_log"):
        other.load_state_dict(weights)


def test_norms_kept_in_fp32() -> None:
    m, x = layer().bfloat16(), torch.randn(1, 5, 32, dtype=torch.bfloat16)
    expected, _ = m(x)
    m.o_norm.float()
    y, _ = m(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.01)


def test_the_cache_is_exported_saved_and_loaded(tmp_path: Path) -> None:
    m, x = layer(), torch.randn(1, 5, 32)
    y, cache = m(x, output_cache=True)
    exported = torch.export.export(m, (x,), {"output_cache": True}).module()
    got, exported_cache = exported(x, output_cache=True)
    assert torch.equal(got, y) and torch.equal(exported_cache.state, cache.state)
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert isinstance(loaded, KimiDeltaCache) and torch.equal(loaded.state, cache.state)
    assert torch.equal(m(x, loaded)[0], m(x, cache)[0])


def test_negative_eigenvalues() -> None:
    m = layer(allow_neg_eigval=True)
    inputs, _ = m.operator_inputs(torch.randn(1, 5, 32))
    assert inputs["allow_neg_eigval"] is True
    plain = layer()
    x = torch.randn(1, 9, 32)
    assert not torch.allclose(m(x)[0], plain(x)[0])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lower_bound": -6.0}, r"lower_bound: expected None or a value in \[-5, 0\), got -6.0"),
        ({"lower_bound": 0.0}, r"lower_bound: expected None or a value in \[-5, 0\), got 0.0"),
        ({"lower_bound": float("nan")}, r"lower_bound: expected None or a value in"),
        ({"backend": "cuda"}, r"backend: expected one of None, auto, tilelang, pypto, torch, got 'cuda'"),
    ],
)
def test_wrong_options_are_refused_when_the_layer_is_made(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(**options)


def test_a_list_of_bounds_is_refused_by_the_operators_words() -> None:
    with pytest.raises(TypeError, match=r"cu_seqlens: expected a torch\.Tensor, got list"):
        layer()(torch.randn(1, 5, 32), cu_seqlens=[0, 5])


def test_masks_of_a_wrong_shape_or_beside_bounds_are_refused() -> None:
    m, x = layer(), torch.randn(1, 5, 32)
    with pytest.raises(ValueError, match=r"attention_mask: expected \[B, T\] = \[1, 5\], got \[1, 4\]"):
        m(x, attention_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match="attention_mask: expected None beside cu_seqlens"):
        m(x, cu_seqlens=torch.tensor([0, 5]), attention_mask=torch.ones(1, 5))
