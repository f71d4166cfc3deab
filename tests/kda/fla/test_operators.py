"""FLA's names: its order of arguments, its defaults, its layouts, its dtypes and its errors."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from calls import HV, PARAMETERS, B, K, dense

import kda
import kda.fla
from kda.fla import chunk_kda, fused_recurrent_kda, fused_recurrent_kda_fwd
from kda.golden import chunk_kda_stages, inputs

FLAGS = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")
PUBLISHED = {
    "chunk_kda": ("scale", "initial_state", "output_final_state", *FLAGS, "safe_gate", "lower_bound",
        "disable_recompute", "return_intermediate_states", "state_v_first", "cu_seqlens", "cu_seqlens_cpu",
        "cp_context", "use_graph", "max_num_seqs"),
    "fused_recurrent_kda": ("A_log", "dt_bias", "scale", "initial_state", "output_final_state", *FLAGS, "lower_bound",
        "state_v_first", "cu_seqlens"),
    "fused_recurrent_kda_fwd": ("A_log", "dt_bias", "initial_state", "scale", "output_final_state",
        "inplace_final_state", "state_v_first", "cu_seqlens", "ssm_state_indices", "num_accepted_tokens", *FLAGS,
        "lower_bound", "out"),
}  # fmt: skip
"""The optional arguments that FLA 0.6 has by position, behind q, k, v, g and beta."""

OPERATORS = {name: getattr(kda.fla, name) for name in PUBLISHED}
each = pytest.mark.parametrize("name", PUBLISHED)


def run(name: str, **call: Any) -> tuple[Any, ...]:
    if name == "fused_recurrent_kda_fwd":
        call = {"inplace_final_state": False} | call
    return OPERATORS[name](**call)


@each
def test_the_published_order_and_defaults(name: str) -> None:
    parameters = inspect.signature(OPERATORS[name]).parameters.values()
    by_position = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in by_position] == ["q", "k", "v", "g", "beta", *PUBLISHED[name]]
    assert {p.name: p.default for p in by_position if p.default} == {
        p.name: inspect.Parameter.empty for p in by_position[:5]
    } | ({"inplace_final_state": True} if name == "fused_recurrent_kda_fwd" else {})


@each
def test_states_are_k_first_unless_said(name: str) -> None:
    call = dense(v=torch.randn(B, 3, HV, K), initial_state=torch.randn(B, HV, K, K), output_final_state=True)  # K = V
    expected, state = kda.chunk_kda(**call, state_v_first=False)
    o, ours = run(name, **call)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(ours, state)
    call["initial_state"] = call["initial_state"].mT
    o, ours = run(name, **call, state_v_first=True)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(ours, state.mT)


@each
def test_the_deprecated_name_of_the_layout(name: str) -> None:
    call = dense(output_final_state=True)
    with pytest.warns(DeprecationWarning, match="renamed to `state_v_first`"):
        _, state = run(name, **call, transpose_state_layout=True)
    torch.testing.assert_close(state, run(name, **call, state_v_first=True)[1])
    with pytest.raises(ValueError, match="Cannot pass both"):
        run(name, **call, state_v_first=True, transpose_state_layout=True)


@each
def test_what_belongs_to_the_gate_is_ignored_without_it(name: str) -> None:
    call = dense()
    ignored = {"A_log": torch.zeros(HV), "dt_bias": torch.ones(HV * K), "lower_bound": -7.0}
    assert torch.equal(run(name, **call, **ignored)[0], run(name, **call)[0])


@each
def test_mixed_dtypes(name: str) -> None:
    """Each in the dtype that FLA's kernels would read it as, and o as FLA returns it."""
    parameters = {n: x.bfloat16() if isinstance(x, torch.Tensor) else x for n, x in PARAMETERS.items()}
    call = dense(**parameters, output_final_state=True)
    mixed = call | {"q": call["q"].half(), "k": call["k"].half(), "v": call["v"].bfloat16(), "g": call["g"].bfloat16()}
    same = {n: x.float() if isinstance(x, torch.Tensor) else x for n, x in mixed.items()}
    o, state = run(name, **mixed)
    expected, expected_state = run(name, **same)
    assert o.dtype == (torch.float16 if name == "chunk_kda" else torch.bfloat16) and state.dtype == torch.float32
    torch.testing.assert_close(o, expected.to(o.dtype))
    torch.testing.assert_close(state, expected_state)


def test_double_precision_returns_fp32_states() -> None:
    call = {name: x.double() for name, x in dense(initial_state=torch.randn(B, HV, K, 4)).items()}
    o, state = fused_recurrent_kda(**call, output_final_state=True)
    assert (o.dtype, state.dtype) == (torch.float64, torch.float32)


@each
def test_what_tunes_flas_kernels_and_what_nobody_knows_changes_nothing(name: str) -> None:
    call = dense()
    tuned = {"disable_recompute": True, "cu_seqlens_cpu": None, "use_graph": True, "max_num_seqs": 3, "chunk_size": 32}
    expected = run(name, **call)[0]
    assert torch.equal(run(name, **call, **tuned, unheard_of=1)[0], expected)


def test_gradients_reach_parameters_of_other_dtypes() -> None:
    A_log = torch.zeros(1, 1, HV, 1, dtype=torch.bfloat16, requires_grad=True)
    dt_bias = torch.zeros(HV * K, dtype=torch.bfloat16, requires_grad=True)
    for operator in (chunk_kda, fused_recurrent_kda):
        o, _ = operator(**dense(), use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias)
        o.sum().backward()
        assert A_log.grad.dtype == torch.bfloat16 and A_log.grad.any() and dt_bias.grad.any()
        A_log.grad = dt_bias.grad = None


@pytest.mark.parametrize("changes, error, message", [
    ({"chunk_size": 16}, ValueError, "`chunk_size` must be either 32 or 64 for KDA, got 16."),
    ({"safe_gate": True, "use_gate_in_kernel": True, "A_log": torch.zeros(HV)}, ValueError,
        "`lower_bound` must be specified when `safe_gate=True` and `use_gate_in_kernel=True`."),
    ({"use_gate_in_kernel": True}, ValueError, "A_log: expected"),
    ({"use_gate_in_kernel": True, "lower_bound": -10.0}, ValueError, "lower_bound: expected"),
    ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval: expected"),
    ({"cp_context": object()}, NotImplementedError, "`cp_context`: expected to be left out"),
    ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, "q: expected"),
])  # fmt: skip
def test_errors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        chunk_kda(**dense(), **changes)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("lengths", [None, [70, 0, 3, 64]])
def test_the_states_before_every_chunk(lengths: list[int] | None, v_first: bool) -> None:
    call = inputs.stable(2 if lengths is None else 1, 137, 2, 16, 8, dtype=torch.float32, lengths=lengths)
    h = chunk_kda_stages(**call)["h"]
    del call["output_final_state"], call["state_v_first"]
    with torch.inference_mode():
        o, state, ours = chunk_kda(**call, return_intermediate_states=True, state_v_first=v_first)
    assert state is None and torch.equal(o, chunk_kda(**call, state_v_first=v_first)[0])
    assert ours.shape[:2] == ((2, 3) if lengths is None else (1, 4)) and ours.dtype == torch.float32
    torch.testing.assert_close((ours.mT if v_first else ours).flatten(0, 1).double(), h, rtol=1e-5, atol=1e-5)


def test_the_states_before_every_chunk_are_for_inference() -> None:
    with pytest.raises(ValueError, match="return_intermediate_states is only allowed in inference mode"):
        chunk_kda(**dense(), return_intermediate_states=True)
    with torch.inference_mode(), pytest.raises(NotImplementedError, match="`chunk_size`: expected 64"):
        chunk_kda(**dense(), return_intermediate_states=True, chunk_size=32)


@pytest.mark.parametrize("name", ["fused_recurrent_kda", "fused_recurrent_kda_fwd"])
def test_a_step_size_for_every_channel_is_refused(name: str) -> None:
    with pytest.raises(NotImplementedError, match=r"`beta`: expected \[B, T, HV\], got \[2, 3, 4, 4\]"):
        run(name, **dense(beta=torch.rand(B, 3, HV, 4)))


def test_the_decoding_step_on_a_pool() -> None:
    """Slot 0 holds a state, an engine's padding is negative, and its index tensors have rows to spare."""
    pool = torch.randn(5, HV, K, 4).bfloat16()
    call = dense(initial_state=pool.clone(), ssm_state_indices=torch.tensor([0, 3, -1, 9]))
    expected, states = kda.fused_recurrent_kda(
        **dense(initial_state=pool[[0, 3]]), state_v_first=False, output_final_state=True
    )
    o, returned = fused_recurrent_kda_fwd(**call)
    assert returned is call["initial_state"]
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(returned[[0, 3]], states)
    assert torch.equal(returned[[1, 2, 4]], pool[[1, 2, 4]])
    call = dense(initial_state=pool.clone(), ssm_state_indices=torch.tensor([[0, 1, 2], [3, -1, 4], [-1, -1, -1]]))
    o, returned = fused_recurrent_kda_fwd(**call, num_accepted_tokens=torch.tensor([1, 1, 0]))
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(returned[[2, 4]], states)


def test_the_decoding_step_works_in_place_by_default_and_without_gradients() -> None:
    call = dense(initial_state=torch.randn(B, HV, K, 4))
    call["q"].requires_grad_()
    expected, expected_state = kda.fused_recurrent_kda(**call, output_final_state=True, state_v_first=False)
    out = torch.empty_like(call["v"])
    o, state = fused_recurrent_kda_fwd(**call, out=out)
    assert o is out and state is call["initial_state"] and not o.requires_grad
    torch.testing.assert_close(o, expected.detach())
    torch.testing.assert_close(state, expected_state.detach())
    with pytest.raises(ValueError, match="inplace_final_state: expected an initial_state"):
        fused_recurrent_kda_fwd(**dense())
