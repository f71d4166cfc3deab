"""Whatever gets past the front end must run: no call may fail with an error that does not name the argument."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from calls import HV, PARAMETERS, B, H, K, S, T, dense, packed, pool
from torch import zeros

import kda

JUNK = {
    "None": None, "True": True, "int": 1, "float": 0.5, "nan": float("nan"), "-inf": -float("inf"), "complex": 1j,
    "str": "torch", "list": [0, 3], "numpy": np.zeros((B, T, H, K), dtype=np.float32), "callable": print,
    "scalar": zeros(()), "bool tensor": zeros(B).bool(), "int tensor": zeros(B, S, dtype=torch.int32),
    "complex tensor": zeros(B, HV) * 1j,
    "meta": zeros(B, T, H, K, device="meta"), "sparse": zeros(B, T, H, K).to_sparse(), "rank 5": zeros(1, B, T, H, K),
    "empty": zeros(0), "empty rank 4": zeros(0, 0, 0, 0), "grad": zeros(B, T, HV, K, requires_grad=True),
    "conj": torch.randn(B, T, H, K, dtype=torch.complex64).conj(), "fp64": zeros(B, T, H, K).double(),
    "expanded": zeros(1).expand(B, T, H, K), "parameter": torch.nn.Parameter(zeros(HV)),
}  # fmt: skip


def run_or_refuse(operator, arguments: dict[str, object]) -> bool:
    """Whether the call ran; if not, the message must say what is wrong with which argument."""
    try:
        o, state = operator(**arguments)
    except (ValueError, TypeError) as error:
        assert re.match(r"(?s)\w+: expected .+, got ", str(error)), f"unclear: {error}"
        return False
    assert o.shape == arguments["v"].shape and (state is None or state.shape[-3] == arguments["v"].shape[-2])
    return True


@pytest.mark.parametrize("base", [dense, packed, pool])
def test_junk_runs_or_is_refused(base) -> None:
    operator = kda.fused_recurrent_kda if base is pool else kda.chunk_kda
    good = base(**PARAMETERS)
    names = [*good, "scale", "lower_bound", "initial_state", "output_final_state", "state_v_first", "backend"]
    ran = sum(run_or_refuse(operator, base(**PARAMETERS | {name: junk})) for name in names for junk in JUNK.values())
    assert 0 < ran < len(names) * len(JUNK) // 2


SIZES = list(itertools.product((0, 1, 2), (0, 1, 3), (1, 2), (1, 2), (1, 5), (1, 3)))


@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_every_small_size_runs(operator) -> None:
    for b, t, h, group, key, value in SIZES:
        arguments = {"q": zeros(b, t, h, key), "k": zeros(b, t, h, key), "v": zeros(b, t, h * group, value),
                     "g": zeros(b, t, h * group, key), "beta": zeros(b, t, h * group)}  # fmt: skip
        assert run_or_refuse(operator, arguments | {"output_final_state": True})
        if b:
            flat = {name: x.flatten(0, 1) for name, x in arguments.items()}
            assert run_or_refuse(operator, flat | {"cu_seqlens": torch.arange(b + 1) * t, "output_final_state": True})
