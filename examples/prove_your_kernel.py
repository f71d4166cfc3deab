"""Prove a chunk kernel of your own: hold it to the golden stage by stage, then let it pass the gates as a backend.

    python examples/prove_your_kernel.py

The kernel here is written in plain torch and works on chunks of 32 tokens, to stand for one that you port to some
device. It has the four stages of docs/golden.md: M1 activation, M2 scores and inverse, M3 wy, M4 carry. The script

1. compares every tensor that it makes on the way with the golden's tensor of that name;
2. registers it as the backend "mine" and runs some of the gates of `python -m kda gate` on it;
3. plants a fault in M3 and lets a gate say at which stage the kernel first departs from the golden.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from kda import backends, golden
from kda.backends.call import KdaCall
from kda.checks import checked
from kda.cli.console import open_console
from kda.gates.case import CASES, Result, run_case
from kda.gates.command import show  # importing it fills CASES

C = 32  # tokens of a chunk: yours to choose, since the golden takes any
GATES = ("L0", "V3", "TAILS", "LAYOUT", "GVA", "EMPTY", "G-1000", "G-INF", "GMIX", "L2NORM", "PADDING", "SOFTPLUS")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class MyKernel:
    """chunk_kda for one chunk after another, in fp32: a backend, as `kda.backends.Backend` describes it."""

    about = "an example in plain torch: chunk_kda in chunks of 32 tokens, without gate and sigmoid"
    differentiable = False  # torch's formulas supply the gradient
    takes = frozenset((  # optional arguments that the code below heeds; calls with another one are refused
        "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens", "state_v_first",
    ))  # fmt: skip

    def unusable(self) -> list[str]:
        return []  # it runs on any machine

    def refuses(self, call: KdaCall) -> list[str]:
        return [] if call.op == "chunk_kda" else ["it has no kernel for decoding"]

    def chunk_kda(self, call: KdaCall) -> tuple[Tensor, Tensor | None]:
        o, state, _ = self.run(call)
        return o.to(call.v.dtype).view(call.v.shape), state if call.output_final_state else None

    def fused_recurrent_kda(self, call: KdaCall) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError("`refuses` turns every such call away")

    def stages(self, call: KdaCall) -> dict[str, Tensor]:
        """Under the golden's names, one entry for each chunk, in the order of the sequences."""
        chunks = self.run(call)[2]
        return {name: torch.stack([chunk[name] for chunk in chunks]) for name in chunks[0] if name != "o"}

    # ---- the kernel

    def run(self, call: KdaCall) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
        """o `[B * T, HV, V]`, the final states in the caller's layout, and every tensor of every chunk."""
        q, k, v, g, beta = (x.flatten(0, 1).float() for x in (call.q, call.k, call.v, call.g, call.beta))
        q, k = (x.repeat_interleave(call.HV // call.H, 1) for x in (q, k))
        equal = [call.T * n for n in range(call.B + 1)]
        bounds = equal if call.cu_seqlens is None else call.cu_seqlens.tolist()
        o, finals, chunks = torch.zeros_like(v), [], []
        for n, (start, end) in enumerate(itertools.pairwise(bounds)):
            S = v.new_zeros(call.HV, call.K, call.V)
            if call.initial_state is not None:
                S = call.initial_state[n].mT if call.state_v_first else call.initial_state[n]
            for t in range(start, end, C):
                rows = slice(t, min(t + C, end))
                chunk = self.activation(call, *(x[rows].transpose(0, 1) for x in (q, k, g, beta)))
                v_chunk = filled(v[rows].transpose(0, 1))
                chunk |= self.scores(chunk["q"], chunk["k"], chunk["beta"], chunk["G"])
                chunk |= self.inverse(chunk["Akk"])
                chunk |= self.wy(chunk["q"], chunk["k"], v_chunk, chunk["beta"], chunk["G"], chunk["Ainv"])
                out, S = self.carry(chunk, S)
                o[rows] = out[:, : rows.stop - t].transpose(0, 1)
                chunks.append(chunk)
            finals.append(S.mT if call.state_v_first else S)
        return o, torch.stack(finals), chunks

    def activation(self, call: KdaCall, q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> dict[str, Tensor]:
        """M1. Rows past the sequence's end are 0, so that they write nothing to the state."""
        if call.use_qk_l2norm_in_kernel:
            # In fp64, since the squares of large elements are beyond fp32: a gate has some.
            q, k = ((x * torch.rsqrt(x.double().square().sum(-1, keepdim=True) + 1e-6)).float() for x in (q, k))
        g = g.clamp(min=-104.0)  # exp(-104) is 0 in fp32, and -inf - (-inf) would be NaN
        G = filled(g).double().cumsum(-2)
        return {"q": filled(q * call.scale), "k": filled(k), "beta": filled(beta.unsqueeze(-1)).squeeze(-1), "G": G}

    def scores(self, q: Tensor, k: Tensor, beta: Tensor, G: Tensor) -> dict[str, Tensor]:
        """M2. The decay between two rows is exp of a difference, and only of rows j <= i: it never overflows."""
        earlier = torch.ones(C, C, dtype=torch.bool, device=G.device).tril()
        distance = (G.unsqueeze(-2) - G.unsqueeze(-3)).masked_fill(~earlier[..., None], -torch.inf)
        decay = distance.exp().float()  # [HV, C, C, K]
        Aqk = torch.einsum("hik,hjk,hijk->hij", q, k, decay)
        Akk = torch.einsum("hik,hjk,hijk->hij", k, k, decay).tril(-1) * beta.unsqueeze(-1)
        return {"Akk": Akk, "Aqk": Aqk}

    def inverse(self, Akk: Tensor) -> dict[str, Tensor]:
        """M2. (I + Akk)⁻¹."""
        eye = torch.eye(C, device=Akk.device)
        return {"Ainv": torch.linalg.solve_triangular(eye + Akk, eye.expand_as(Akk), upper=False, unitriangular=True)}

    def wy(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, G: Tensor, Ainv: Tensor) -> dict[str, Tensor]:
        """M3."""
        from_start, to_end = G.exp().float(), (G[:, -1:] - G).exp().float()
        beta = beta.unsqueeze(-1)
        w, u = Ainv @ (beta * k * from_start), Ainv @ (beta * v)
        return {"qg": q * from_start, "kg": k * to_end, "decay": from_start[:, -1], "w": w, "u": u}

    def carry(self, chunk: dict[str, Tensor], S: Tensor) -> tuple[Tensor, Tensor]:
        """M4. The output reads the state that enters the chunk, before the chunk's own tokens are written to it."""
        chunk |= {"h": S, "v_new": chunk["u"] - chunk["w"] @ S}
        o = chunk["qg"] @ S + chunk["Aqk"] @ chunk["v_new"]
        return o, chunk["decay"].unsqueeze(-1) * S + chunk["kg"].mT @ chunk["v_new"]


class WithFault(MyKernel):
    """The same kernel with an error that is easily made: kg has the decay from the chunk's start to the row."""

    def wy(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, G: Tensor, Ainv: Tensor) -> dict[str, Tensor]:
        return super().wy(q, k, v, beta, G, Ainv) | {"kg": k * G.exp().float()}


def filled(x: Tensor) -> Tensor:
    """x `[HV, rows, dim]` with zeros up to C rows."""
    return torch.nn.functional.pad(x, (0, 0, 0, C - x.shape[1]))


def gates(kernel: MyKernel, *ids: str) -> list[Result]:
    """Run gates on the kernel, which is the backend "mine" meanwhile."""
    backends.register("mine", kernel)
    try:
        return [run_case(CASES[id], "mine", DEVICE, torch.bfloat16) for id in ids]
    finally:
        backends.unregister("mine")


def main() -> None:
    inputs = golden.inputs.stable(1, 150, 2, 64, HV=4, lengths=[64, 0, 37, 49], initial_state=True, device=DEVICE)
    actual = MyKernel().stages(checked("chunk_kda", **inputs))
    expected = golden.chunk_kda_stages(**inputs, chunk_size=C)
    print("1. every tensor of the kernel against the golden's, relative RMSE:")
    for stage, names in golden.STAGES.items():
        errors = {name: golden.rel_rmse(actual[name], expected[name]) for name in names}
        print(f"   {stage}  " + ", ".join(f"{name} {error:.0e}" for name, error in errors.items()))
        assert max(errors.values()) <= 5e-3

    print("\n2. the gates; SOFTPLUS needs an argument that the kernel does not take, so it is refused:")
    results = gates(MyKernel(), *GATES)
    show(open_console(), results)
    assert {r.case.id for r in results if r.outcome != "passed"} == {"SOFTPLUS"}

    print("\n3. a fault in M3; the gate says where it lies:")
    (result,) = gates(WithFault(), "L0")
    (found,) = [finding.text for finding in result.findings if finding.what == "stage"]
    print(f"   L0 {result.outcome}; {found}")
    assert result.outcome == "failed" and "M3 (kg" in found


if __name__ == "__main__":
    main()
