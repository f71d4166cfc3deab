"""The checks are light: they read no value, and a call like one that has passed is not checked again."""

from __future__ import annotations

import pytest
import torch
from calls import HV, PARAMETERS, B, H, K, T, dense, packed, pool
from recorder import Recorder

from kda.checks import checked


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("arguments", [dense(**PARAMETERS), packed(), pool(**PARAMETERS)])
def test_front_end_only_views(arguments, device, monkeypatch) -> None:
    """No value is read and nothing is computed or copied: the front end can be captured in a CUDA graph."""
    arguments = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    with Recorder() as recorder:
        checked("fused_recurrent_kda", **arguments)
    assert recorder.names <= {"unsqueeze", "view"}
    if device == "cpu":
        monkeypatch.setenv("KDA_CHECK", "1")
        with Recorder() as recorder:
            checked("fused_recurrent_kda", **arguments)
        assert "_local_scalar_dense" in recorder.names, "the recorder would have seen a copy to the host"


AS_IF_SEEN = {
    "a flag that equals True": dense(output_final_state=1),
    "a scale that equals 1.0": dense(scale=True),
    "a sparse q": dense(q=torch.zeros(B, T, H, K).to_sparse()),
    "q of another dtype": dense(q=torch.zeros(B, T, H, K, dtype=torch.float64)),
    "beta on another device": dense(beta=torch.zeros(B, T, HV, device="meta")),
    "an unhashable flag": dense(output_final_state=[True]),
}


@pytest.mark.parametrize("bad", AS_IF_SEEN.values(), ids=AS_IF_SEEN)
def test_a_bad_call_is_refused_after_a_good_one_like_it(bad):
    """Calls that passed once are not checked again, and nothing else must pass for one of them."""
    for good in (dense(output_final_state=True), dense(scale=1.0)):
        checked("chunk_kda", **good)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)):
            checked("chunk_kda", **bad)


def test_calls_alike_share_a_memo_and_others_do_not():
    memo = checked("chunk_kda", **dense()).memo
    assert checked("chunk_kda", **dense(q=torch.randn(B, T, H, K))).memo is memo
    for other in (dense(scale=0.5), dense(state_v_first=False), dense(cu_seqlens=None, output_final_state=True)):
        assert checked("chunk_kda", **other).memo is not memo
    assert checked("fused_recurrent_kda", **dense()).memo is not memo
