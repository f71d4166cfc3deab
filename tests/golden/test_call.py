"""The golden's view of a call: both forms take every layout, leave the arguments alone, and refuse contradictions."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from golden_calls import PER_TOKEN, RAGGED, ragged
from torch import Tensor

import kda
from kda.backends.call import WRITTEN
from kda.golden import chunk_kda_golden, compare, inputs, recurrent_kda_golden
from kda.golden.call import Call
from kda.golden.recurrent import RecurrentCall


def test_layouts_agree() -> None:
    call = ragged(state_v_first=True)
    kv = call | {"initial_state": call["initial_state"].transpose(-1, -2).contiguous(), "state_v_first": False}
    flat = call | {name: call[name][0] for name in PER_TOKEN}
    for form in (chunk_kda_golden, recurrent_kda_golden):
        o, state = form(**call)
        assert state.shape == call["initial_state"].shape
        o_kv, state_kv = form(**kv)
        assert torch.equal(o, o_kv) and torch.equal(state, state_kv.transpose(-1, -2))
        o_flat, state_flat = form(**flat)
        assert torch.equal(o[0], o_flat) and torch.equal(state, state_flat)


def test_padding_and_unused_memory_leave_no_trace() -> None:
    call = ragged(lengths=RAGGED[:4])
    end = sum(RAGGED[:4])
    clean = chunk_kda_golden(**call)
    for name in PER_TOKEN:
        call[name][:, end:] = math.nan
    for form in (chunk_kda_golden, recurrent_kda_golden):
        o, state = form(**call)
        assert o[:, end:].eq(0).all() and compare(o, clean[0], atol=1e-10, rtol=1e-10).ok
        assert compare(state, clean[1], atol=1e-10, rtol=1e-10).ok


def test_noncontiguous_inputs_and_gradients_leave_arguments_alone() -> None:
    call = ragged(HV=2, V=32)
    fused = torch.cat([call["q"], call["k"], call["v"]], -1).requires_grad_()
    strided = call | dict(zip(("q", "k", "v"), fused.split(32, -1), strict=True))
    strided["initial_state"] = call["initial_state"].transpose(0, 1).contiguous().transpose(0, 1)
    before = {name: x.clone() for name, x in strided.items() if isinstance(x, Tensor)}
    for form in (chunk_kda_golden, recurrent_kda_golden):
        o, state = form(**strided)
        assert not o.requires_grad
        assert torch.equal(o, form(**call)[0]) and torch.equal(state, form(**call)[1])
    assert all(torch.equal(strided[name], x) for name, x in before.items())


@pytest.mark.parametrize(("form", "golden"), [("chunk_kda", Call), ("fused_recurrent_kda", RecurrentCall)])
def test_arguments_are_the_operators(form: str, golden: type) -> None:
    """All but the backend and the tensors that are there to be written, of which the golden writes none."""
    ours, theirs = (inspect.signature(f).parameters.values() for f in (golden, getattr(kda, form)))
    known = {p.name: p.default for p in ours}
    left_out = {"backend", *WRITTEN[form]}
    assert {p.name: p.default for p in theirs if p.name not in left_out}.items() <= known.items()
    positional = [[p.name for p in its if p.kind is p.POSITIONAL_OR_KEYWORD] for its in (ours, theirs)]
    assert positional[0] == positional[1] and set(known) - {p.name for p in theirs} <= {
        "has_initial_state",
        "checkpoint_offsets",
    }


def test_contradicting_shapes_are_refused() -> None:
    call = inputs.stable(2, 5, 2, 16)
    with pytest.raises(ValueError, match="batch 1 with cu_seqlens, got 2"):
        chunk_kda_golden(**call, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"multiple of q's 2, got 3"):
        chunk_kda_golden(**inputs.stable(1, 5, 2, 16, HV=3))
    with pytest.raises(ValueError, match=r"\[B, T, H, K\] without cu_seqlens"):
        chunk_kda_golden(**call | {"q": call["q"][0]})
    with pytest.raises(TypeError, match="head_first"):
        chunk_kda_golden(**call, head_first=True)
