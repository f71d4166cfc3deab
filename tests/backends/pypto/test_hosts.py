"""The PyPTO backend around its kernels: which calls it takes, and what its hosts do on the way to a kernel."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from pypto_process import in_its_own_process
from torch import Tensor

import kda
from kda.backends import pypto as pypto_backend
from kda.checks import checked
from kda.golden import inputs


def test_all_reasons_come_at_once(monkeypatch):
    monkeypatch.delenv("KDA_EMULATE", raising=False)
    call = checked("chunk_kda", **inputs.stable(1, 10, 1, 16, 32, dtype=torch.float64))
    reasons = pypto_backend.refuses(call)
    assert reasons == [
        "its tensors must be on npu, got cpu", "it computes in float32, got float64", "K must be 64 or 128, got 16",
        "V must be 64 or 128, got 32",
    ]  # fmt: skip


def test_tensors_past_int32_are_refused(monkeypatch):
    monkeypatch.setenv("KDA_EMULATE", "1")
    monkeypatch.setattr(pypto_backend, "missing_interpreter", lambda: None)
    small = inputs.stable(1, 1, 1)
    for T, reasons in ((2**24 - 1, 0), (2**24, 1)):
        call = {name: x.expand(1, T, *x.shape[2:]) if isinstance(x, Tensor) else x for name, x in small.items()}
        assert len(pypto_backend.refuses(checked("chunk_kda", **call))) == reasons
    pool = small | {"ssm_state_indices": torch.ones(1, dtype=torch.int32)}
    for slots, reasons in ((2**17 - 1, 0), (2**17, 1)):
        pool["initial_state"] = torch.zeros(1).expand(slots, 1, 128, 128)
        assert len(pypto_backend.refuses(checked("fused_recurrent_kda", **pool))) == reasons
    each_token = small | {
        name: small[name].expand(1, 2**17, *small[name].shape[2:]) for name in ("q", "k", "v", "g", "beta")
    }
    each_token |= {
        "initial_state": torch.zeros(2, 1, 128, 128),
        "ssm_state_indices": torch.ones(1, 2**17, dtype=torch.int32),
    }
    assert len(pypto_backend.refuses(checked("fused_recurrent_kda", **each_token))) == 1


def test_the_host_reads_no_tensor_value(monkeypatch):
    """On meta tensors, which have none, everything but the kernel itself runs; and the kernel gets what it expects."""
    pytest.importorskip("pypto")
    from kda.backends.pypto import chunk, recurrent

    launched = []
    for module in (chunk, recurrent):
        monkeypatch.setattr(module, "run", lambda body, ins, outs, config: launched.append((body, ins, outs)))
    packed = inputs.raw(1, 9, 2, HV=4, lengths=[4, 0, 5], initial_state=True)
    strided = torch.zeros(9, 4, 128, 144)[..., :128]
    slots = torch.tensor([[1, 2, 3, 4, 5], [6, 6, 6, 6, 6], [0, 1, 2, 3, 4]])
    calls = [
        ("chunk_kda", packed), ("chunk_kda", inputs.stable(3, 5, 1)), ("fused_recurrent_kda", packed),
        ("fused_recurrent_kda", {**packed, "inplace_final_state": True}),
        ("fused_recurrent_kda", {**packed, "initial_state": strided, "ssm_state_indices": slots,
                                 "num_accepted_tokens": torch.ones(3, dtype=torch.int64)}),
        ("fused_recurrent_kda", {**packed, "initial_state": strided, "ssm_state_indices": slots,
                                 "inplace_final_state": True}),
        ("fused_recurrent_kda", {**packed, "initial_state": strided, "ssm_state_indices": slots[:, 0]}),
    ]  # fmt: skip
    for op, arguments in calls:
        on_meta = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in arguments.items()}
        if arguments.get("initial_state") is strided:
            on_meta["initial_state"] = torch.zeros(9, 4, 128, 144, device="meta")[..., :128]
        o, _ = getattr(pypto_backend, op)(checked(op, **on_meta))
        assert o.is_meta and o.shape == arguments["v"].shape
        body, ins, outs = launched.pop()
        assert body.__name__ == op
        assert all(x.is_meta and x.is_contiguous() for x in (*ins, *outs))
        assert all(x.dtype in (torch.int32, torch.bool) for x in ins if not x.is_floating_point())  # bounds and masks
    assert not launched


@in_its_own_process
def test_pypto_leaves_the_root_logger_alone() -> None:
    assert "pypto" not in sys.modules
    kda.chunk_kda(**inputs.stable(1, 1, 1), backend="pypto")
    assert "pypto" in sys.modules
    assert logging.getLogger().level == logging.WARNING and not logging.getLogger().handlers
