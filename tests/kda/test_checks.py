"""The front end: every bad argument is refused with the argument's name, what was expected and what came."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from calls import CU, HV, PARAMETERS, B, H, K, T, V, dense, packed, without

import kda
from kda.checks import checked

zeros, ints = torch.zeros, lambda *shape: torch.zeros(*shape, dtype=torch.int32)
STATE = zeros(B, HV, V, K)
META = torch.device("meta")


BAD_CHUNK = {
    # ranks
    "q of rank 2": (dense(q=zeros(T, K)), ValueError,
        "q: expected [B, T, H, K], got rank 2 with shape [3, 8]"),
    "packed without cu_seqlens": (without(packed(), "cu_seqlens"), ValueError,
        "q: expected [B, T, H, K], got rank 3 with shape [3, 2, 8]; a packed [T, H, K] needs cu_seqlens"),
    "q of rank 2 with cu_seqlens": (packed(q=zeros(T, K)), ValueError,
        "q: expected [T, H, K] or [1, T, H, K] (cu_seqlens is given), got rank 2 with shape [3, 8]"),
    "k of another rank": (dense(k=zeros(T, H, K)), ValueError,
        "k: expected rank 4 beside q of rank 4, got shape [3, 2, 8]"),
    "beta of g's rank": (dense(beta=zeros(B, T, HV, 1)), ValueError,
        "beta: expected rank 3 beside q of rank 4, got shape [2, 3, 4, 1]"),
    "packed v of rank 4": (packed(v=zeros(1, T, HV, V)), ValueError,
        "v: expected rank 3 beside q of rank 3, got shape [1, 3, 4, 4]"),
    # sizes
    "k with other heads": (dense(k=zeros(B, T, HV, K)), ValueError,
        "k: expected shape [B, T, H, K] as q = [2, 3, 2, 8], got [2, 3, 4, 8]"),
    "k with another K": (dense(k=zeros(B, T, H, K + 1)), ValueError,
        "k: expected shape [B, T, H, K] as q = [2, 3, 2, 8], got [2, 3, 2, 9]"),
    "packed k with another K": (packed(k=zeros(T, H, K + 1)), ValueError,
        "k: expected shape [T, H, K] as q = [3, 2, 8], got [3, 2, 9]"),
    "v with another T": (dense(v=zeros(B, T + 1, HV, V)), ValueError,
        "v: expected shape [B, T, HV, V] beside q = [2, 3, 4, 4], got [2, 4, 4, 4]"),
    "HV no multiple of H": (dense(v=zeros(B, T, 3, V)), ValueError,
        "v: expected HV a positive multiple of H = 2 and V >= 1, got HV = 3, V = 4"),
    "no value head": (dense(v=zeros(B, T, 0, V)), ValueError,
        "v: expected HV a positive multiple of H = 2 and V >= 1, got HV = 0, V = 4"),
    "V = 0": (dense(v=zeros(B, T, HV, 0)), ValueError,
        "v: expected HV a positive multiple of H = 2 and V >= 1, got HV = 4, V = 0"),
    "no head": (dense(q=zeros(B, T, 0, K)), ValueError,
        "q: expected H >= 1 and K >= 1, got shape [2, 3, 0, 8]"),
    "K = 0": (dense(q=zeros(B, T, H, 0)), ValueError,
        "q: expected H >= 1 and K >= 1, got shape [2, 3, 2, 0]"),
    "g for q's heads": (dense(g=zeros(B, T, H, K)), ValueError,
        "g: expected shape [B, T, HV, K] = [2, 3, 4, 8], got [2, 3, 2, 8]"),
    "beta for q's heads": (dense(beta=zeros(B, T, H)), ValueError,
        "beta: expected shape [B, T, HV] = [2, 3, 4], got [2, 3, 2]"),
    "batch beside cu_seqlens": (dense(cu_seqlens=CU), ValueError,
        "q: expected batch size 1 beside cu_seqlens, got shape [2, 3, 2, 8]"),
    # dtypes, devices and kinds
    "integer q": (dense(q=ints(B, T, H, K)), TypeError,
        "q: expected dtype bfloat16 or float16 or float32 or float64, got int32"),
    "complex q": (dense(q=zeros(B, T, H, K, dtype=torch.complex64)), TypeError,
        "q: expected dtype bfloat16 or float16 or float32 or float64, got complex64"),
    "k of another dtype": (dense(k=zeros(B, T, H, K).half()), TypeError,
        "k: expected dtype float32, got float16"),
    "v of another dtype": (dense(v=zeros(B, T, HV, V).bfloat16()), TypeError,
        "v: expected dtype float32, got bfloat16"),
    "g of a third dtype": (dense(g=zeros(B, T, HV, K).double()), TypeError,
        "g: expected dtype float32, got float64"),
    "beta of a third dtype": (
        dense(**{n: x.bfloat16() for n, x in dense().items()}) | {"beta": zeros(B, T, HV).half()}, TypeError,
        "beta: expected dtype float32 or bfloat16, got float16"),
    "q without a dtype of ours": (dense(q=zeros(B, T, H, K).to(torch.float8_e4m3fn)), TypeError,
        "q: expected dtype bfloat16 or float16 or float32 or float64, got float8_e4m3fn"),
    **{f"{name} on another device": (dense(**{name: x.to(META)}), ValueError,
        f"{name}: expected device cpu as q, got meta") for name, x in dense().items() if name != "q"},
    "q alone on another device": (dense(q=zeros(B, T, H, K, device=META)), ValueError,
        "k: expected device meta as q, got cpu"),
    **{f"{name} as a list": (dense(**{name: x.tolist()}), TypeError,
        f"{name}: expected a torch.Tensor, got list") for name, x in dense().items()},
    "q None": (dense(q=None), TypeError, "q: expected a torch.Tensor, got NoneType"),
    "v as a numpy array": (dense(v=np.zeros((B, T, HV, V))), TypeError,
        "v: expected a torch.Tensor, got ndarray"),
    "sparse q": (dense(q=zeros(B, T, H, K).to_sparse()), TypeError,
        "q: expected a dense tensor, got torch.sparse_coo"),
    "nested v": (dense(v=torch.nested.nested_tensor([zeros(T, HV, V)] * B, layout=torch.jagged)), TypeError,
        "v: expected a dense tensor, got a nested one"),
    # cu_seqlens
    "cu_seqlens as a list": (packed(cu_seqlens=[0, 3]), TypeError,
        "cu_seqlens: expected a torch.Tensor, got list"),
    "cu_seqlens as floats": (packed(cu_seqlens=CU.float()), TypeError,
        "cu_seqlens: expected dtype int32 or int64, got float32"),
    "cu_seqlens as int16": (packed(cu_seqlens=CU.short()), TypeError,
        "cu_seqlens: expected dtype int32 or int64, got int16"),
    "cu_seqlens of rank 0": (packed(cu_seqlens=torch.tensor(3)), ValueError,
        "cu_seqlens: expected shape [N + 1] with N >= 1, got []"),
    "cu_seqlens of rank 2": (packed(cu_seqlens=CU[None]), ValueError,
        "cu_seqlens: expected shape [N + 1] with N >= 1, got [1, 4]"),
    "cu_seqlens of one element": (packed(cu_seqlens=CU[:1]), ValueError,
        "cu_seqlens: expected shape [N + 1] with N >= 1, got [1]"),
    "cu_seqlens elsewhere": (packed(cu_seqlens=CU.to(META)), ValueError,
        "cu_seqlens: expected device cpu as q, got meta"),
    # numbers and flags
    "scale as a tensor": (dense(scale=torch.tensor(0.5)), TypeError,
        "scale: expected a number or None, got Tensor"),
    "scale as a string": (dense(scale="1"), TypeError, "scale: expected a number or None, got str"),
    "scale True": (dense(scale=True), TypeError, "scale: expected a number or None, got bool"),
    "scale NaN": (dense(scale=float("nan")), ValueError, "scale: expected a finite number, got nan"),
    "scale infinite": (dense(scale=float("inf")), ValueError, "scale: expected a finite number, got inf"),
    **{f"{name} no bool": (dense(**{name: 1}), TypeError, f"{name}: expected a bool, got int")
       for name in ("output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
                    "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first")},
    "a tensor as flag": (dense(use_gate_in_kernel=torch.tensor(True)), TypeError,
        "use_gate_in_kernel: expected a bool, got Tensor"),
    "negative eigenvalues of given beta": (dense(allow_neg_eigval=True), ValueError,
        "allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True beside it, got False"),
    **{f"lower_bound {value}": (dense(**PARAMETERS, lower_bound=value), ValueError,
        f"lower_bound: expected a value in [-5, 0), got {float(value)}") for value in (-5.001, 0, 1.0)},
    "lower_bound NaN": (dense(**PARAMETERS, lower_bound=float("nan")), ValueError,
        "lower_bound: expected a finite number, got nan"),
    "lower_bound as a tensor": (dense(**PARAMETERS, lower_bound=torch.tensor(-1.0)), TypeError,
        "lower_bound: expected a number or None, got Tensor"),
    # the gate's parameters
    "A_log missing": (dense(use_gate_in_kernel=True), ValueError,
        "A_log: expected a tensor of HV elements with use_gate_in_kernel (only with lower_bound may it be None), "
        "got None"),
    "A_log without the gate": (dense(A_log=zeros(HV)), ValueError,
        "A_log: expected None without use_gate_in_kernel=True, got Tensor"),
    "dt_bias without the gate": (dense(dt_bias=zeros(HV, K)), ValueError,
        "dt_bias: expected None without use_gate_in_kernel=True, got Tensor"),
    "lower_bound without the gate": (dense(lower_bound=-1.0), ValueError,
        "lower_bound: expected None without use_gate_in_kernel=True, got float"),
    "A_log for q's heads": (dense(use_gate_in_kernel=True, A_log=zeros(H)), ValueError,
        "A_log: expected HV = 4 elements, got [2]"),
    "dt_bias a head short": (dense(**PARAMETERS | {"dt_bias": zeros(HV - 1, K)}), ValueError,
        "dt_bias: expected HV * K = 32 elements, got [3, 8]"),
    "A_log in half precision": (dense(**PARAMETERS | {"A_log": zeros(HV).half()}), TypeError,
        "A_log: expected dtype float32, got float16"),
    "A_log as a float": (dense(use_gate_in_kernel=True, A_log=0.0), TypeError,
        "A_log: expected a torch.Tensor, got float"),
    "dt_bias elsewhere": (dense(**PARAMETERS | {"dt_bias": zeros(HV, K, device=META)}), ValueError,
        "dt_bias: expected device cpu as q, got meta"),
    # the state
    "state for another N": (dense(initial_state=zeros(B + 1, HV, V, K)), ValueError,
        "initial_state: expected shape [N, HV, V, K] = [2, 4, 4, 8], got [3, 4, 4, 8]"),
    "packed state for B": (packed(initial_state=zeros(1, HV, V, K)), ValueError,
        "initial_state: expected shape [N, HV, V, K] = [3, 4, 4, 8], got [1, 4, 4, 8]"),
    "state for q's heads": (dense(initial_state=zeros(B, H, V, K)), ValueError,
        "initial_state: expected shape [N, HV, V, K] = [2, 4, 4, 8], got [2, 2, 4, 8]"),
    "state K first": (dense(initial_state=zeros(B, HV, K, V)), ValueError,
        "initial_state: expected shape [N, HV, V, K] = [2, 4, 4, 8], got [2, 4, 8, 4]: "
        "that is the layout of state_v_first=False"),
    "state V first": (dense(initial_state=STATE, state_v_first=False), ValueError,
        "initial_state: expected shape [N, HV, K, V] = [2, 4, 8, 4], got [2, 4, 4, 8]: "
        "that is the layout of state_v_first=True"),
    "state of rank 0": (dense(initial_state=zeros(())), ValueError,
        "initial_state: expected shape [N, HV, V, K] = [2, 4, 4, 8], got []"),
    "fp64 state beside bf16": (
        dense(**{n: x.bfloat16() for n, x in dense().items()}, initial_state=STATE.double()), TypeError,
        "initial_state: expected dtype float32 or bfloat16 or float16, got float64"),
    "fp32 state beside fp64": (dense(**{n: x.double() for n, x in dense().items()}, initial_state=STATE), TypeError,
        "initial_state: expected dtype float64 or bfloat16 or float16, got float32"),
    "state as a number": (dense(initial_state=0), TypeError,
        "initial_state: expected a torch.Tensor, got int"),
    "state elsewhere": (dense(initial_state=STATE.to(META)), ValueError,
        "initial_state: expected device cpu as q, got meta"),
}  # fmt: skip


@pytest.mark.usefixtures("no_backend")
@pytest.mark.parametrize("arguments, error, message", BAD_CHUNK.values(), ids=BAD_CHUNK)
@pytest.mark.parametrize("operator", [kda.chunk_kda, kda.fused_recurrent_kda])
def test_both_operators_refuse(operator, arguments, error, message) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        operator(**arguments)


@pytest.mark.usefixtures("no_backend")
@pytest.mark.parametrize("name", ["head_first", "num_accepted_tokens"])
def test_unknown_keyword(name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        kda.chunk_kda(**dense(**{name: None}))


GOOD = {
    "dense": (dense(), {"B": B, "T": T, "H": H, "K": K, "HV": HV, "V": V, "N": B, "scale": K**-0.5}),
    "an int as scale": (dense(scale=2), {"scale": 2.0}),
    "a numpy number as scale": (dense(scale=np.float32(0.5)), {"scale": 0.5}),
    "packed": (packed(), {"B": 1, "T": T, "N": 3}),
    "one packed sequence": (packed(cu_seqlens=torch.tensor([0, T])), {"N": 1}),
    "packed with a batch axis": ({n: x[:1] for n, x in dense().items()} | {"cu_seqlens": CU.int()}, {"B": 1, "N": 3}),
    "sizes of one": ({n: torch.zeros(1, 1, 1, 1)[..., 0] if n == "beta" else torch.zeros(1, 1, 1, 1) for n in dense()},
        {"B": 1, "T": 1, "H": 1, "K": 1, "HV": 1, "V": 1}),
    "no token": (dense(**{n: x[:, :0] for n, x in dense().items()}), {"T": 0, "N": B}),
    "no sequence": (dense(**{n: x[:0] for n, x in dense().items()}), {"B": 0, "N": 0}),
    "g and beta in bf16": ({n: x.bfloat16() for n, x in dense().items()}, {}),
    "A_log in any shape": (dense(**PARAMETERS | {"A_log": zeros(1, 1, HV, 1)}), {}),
    "the least lower bound": (dense(use_gate_in_kernel=True, lower_bound=-5), {"lower_bound": -5.0, "A_log": None}),
    "state K first": (dense(initial_state=zeros(B, HV, K, V), state_v_first=False), {}),
    "fp64 throughout": ({n: x.double() for n, x in dense(initial_state=STATE).items()}, {}),
}  # fmt: skip


@pytest.mark.parametrize("arguments, expected", GOOD.values(), ids=GOOD)
def test_good_calls_arrive_in_one_form(arguments, expected) -> None:
    call = checked("chunk_kda", **arguments)
    assert call.q.shape == (call.B, call.T, call.H, call.K) and call.beta.shape == (call.B, call.T, call.HV)
    assert {name: getattr(call, name) for name in expected} == expected
    if call.A_log is not None:
        assert call.A_log.shape == (call.HV,) and call.dt_bias.shape == (call.HV * call.K,)
