"""Serve requests that come and go, as an inference engine does: the states of all of them in one pool, in place.

    python examples/serve_with_pool.py

Each request has a prompt and then some tokens to generate. In every step the engine

1. admits the requests that have arrived and for which a slot is free, and runs all their prompts in one packed call of
   `kda.chunk_kda`, whose final states it puts into their slots;
2. runs one token of every running request in one call of `kda.fused_recurrent_kda`, which reads each state in its slot
   and writes it back there. The batch always has the same size, as a CUDA graph needs it: rows without a request have
   a negative slot, for which nothing is read or written;
3. takes the finished requests out, so that their slots are free again.

The tensors stand for what a model's projections would give for each token. In the end the outputs of every request
have to be those of one long call over its prompt and its generated tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import kda
from kda.golden import rel_rmse

HEADS, DIM = 2, 64
SLOTS, BATCH = 5, 6
"""States in the pool beside the null slot 0, and rows of every decoding call."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE, LIMIT = (torch.bfloat16, 1e-2) if DEVICE == "cuda" else (torch.float32, 1e-5)


@dataclass(eq=False)
class Request:
    """What one user asks for, and how far it is."""

    name: str
    arrives: int  # in this step of the engine
    prompt: int  # tokens
    inputs: dict[str, Any]  # of all its tokens, [T, ...]
    slot: int = 0
    outputs: list[Tensor] = field(default_factory=list)  # [tokens, HEADS, DIM] each

    @property
    def done(self) -> int:
        """Tokens that have been computed."""
        return sum(len(o) for o in self.outputs)

    @property
    def finished(self) -> bool:
        return self.done == len(self.inputs["beta"])

    def tokens(self, start: int, stop: int) -> dict[str, Any]:
        return {name: x[start:stop] for name, x in self.inputs.items()}


class Engine:
    """One KDA layer's side of an inference engine."""

    def __init__(self) -> None:
        self.pool = torch.zeros(1 + SLOTS, HEADS, DIM, DIM, device=DEVICE)  # fp32; slot 0 is the null slot
        self.free = list(range(1, 1 + SLOTS))
        self.running: list[Request] = []
        self.options: dict[str, Any] = {
            "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
            "A_log": torch.linspace(0.0, 2.0, HEADS, device=DEVICE),
            "dt_bias": torch.full((HEADS * DIM,), -3.0, device=DEVICE),
        }  # fmt: skip

    def admit(self, requests: list[Request]) -> None:
        """Give each request a slot and compute its prompt: one packed call, however different their lengths are."""
        for request in requests:
            request.slot = self.free.pop()
        prompts = [request.tokens(0, request.prompt) for request in requests]
        packed: dict[str, Any] = {name: torch.cat([prompt[name] for prompt in prompts]) for name in prompts[0]}
        lengths = [request.prompt for request in requests]
        cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
        o, states = kda.chunk_kda(**packed, **self.options, cu_seqlens=cu_seqlens, output_final_state=True)
        assert states is not None
        self.pool[[request.slot for request in requests]] = states
        for request, part in zip(requests, o.split(lengths), strict=True):
            request.outputs.append(part)
        self.running += requests

    @torch.no_grad()
    def decode(self) -> None:
        """Compute the next token of every running request, in a batch of BATCH rows."""
        now = [request.tokens(request.done, request.done + 1) for request in self.running]
        batch: dict[str, Any] = {
            name: torch.cat([torch.stack([row[name] for row in now]), x.new_zeros(BATCH - len(now), *x.shape)])
            for name, x in now[0].items()
        }
        slots = [request.slot for request in self.running] + [-1] * (BATCH - len(now))
        o, pool = kda.fused_recurrent_kda(
            **batch, **self.options, initial_state=self.pool, inplace_final_state=True, output_final_state=True,
            ssm_state_indices=torch.tensor(slots, dtype=torch.int32, device=DEVICE),
        )  # fmt: skip
        assert pool is self.pool  # the pool itself: no state was copied
        for request, row in zip(self.running, o[: len(now)], strict=True):
            request.outputs.append(row)

    def release(self) -> list[Request]:
        """Take out what has finished. A slot needs no clearing: the next prompt overwrites it."""
        finished = [request for request in self.running if request.finished]
        self.running = [request for request in self.running if not request.finished]
        self.free += [request.slot for request in finished]
        return finished


def make_requests(count: int) -> list[Request]:
    """Seeded requests of different lengths, in the order in which they arrive."""
    chosen, requests = random.Random(0), []
    torch.manual_seed(0)
    for n in range(count):
        prompt, generated = chosen.randint(1, 150), chosen.randint(1, 12)
        T, shape = prompt + generated, (prompt + generated, HEADS, DIM)
        inputs = {name: torch.randn(shape, device=DEVICE, dtype=DTYPE) for name in ("q", "k", "v", "g")}
        inputs["beta"] = torch.randn(T, HEADS, device=DEVICE, dtype=DTYPE)
        requests.append(Request(f"request {n}", chosen.randint(0, 8), prompt, inputs))
    return sorted(requests, key=lambda request: request.arrives)


def check(request: Request, engine: Engine) -> float:
    """How far the request's outputs are from one long call."""
    everything = torch.tensor([0, len(request.inputs["beta"])], device=DEVICE)
    expected, _ = kda.chunk_kda(**request.inputs, **engine.options, cu_seqlens=everything)
    return rel_rmse(torch.cat(request.outputs), expected)


def main() -> None:
    engine, waiting, step = Engine(), make_requests(12), 0
    while waiting or engine.running:
        arrived = [request for request in waiting if request.arrives <= step][: len(engine.free)]
        waiting = waiting[len(arrived) :]  # they stand in order of arrival
        if arrived:
            engine.admit(arrived)
        if engine.running:
            engine.decode()
        print(f"step {step:2d}: {len(arrived)} admitted, {len(engine.running)} running, {len(waiting)} to come")
        for request in engine.release():
            error = check(request, engine)
            print(f"  {request.name} finished: {request.done} tokens in slot {request.slot}, off by {error:.1e}")
            assert error <= LIMIT, f"{request.name} differs from one long call"
        step += 1
    print("all requests agree with one long call each")


if __name__ == "__main__":
    main()
