"""The benchmark's cases: sizes, the bytes and operations that each one ideally takes, and its inputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kda.backends.call import DIFFERENTIABLE
from kda.golden.constants import CHUNK_SIZE as CHUNK

LOWER_BOUND = -5.0
BYTES_FORMULA = "T·H·(3K + 2V + 1)·b + 8·N·H·K·V + 4·H·(K + 1), and 8·(N + 1) for cu_seqlens"
RECURRENT_FLOPS_FORMULA = "per token and head: 7·K·V (decoding)"
BYTES_MEANING = (
    "each input and output once: q, k, g, v, o, beta of b = 2 bytes; fp32 states in and out; A_log and dt_bias"
)
FLOPS_FORMULA = "per chunk and head: C²·(6K + 4V) + 6·C·K·V + C³/3"
TRAINING_BYTES_FORMULA = "in training T·H·(9K + 5V + 3)·b + 12·H·(K + 1), and 16·(N + 1) for cu_seqlens"
TRAINING_FLOPS_FORMULA = "in training C²·(8K + 8V) + 12·C·K·V more"
FLOPS_MEANING = (
    "C = 64, or what is left for the last chunk; Akk, Aqk, w, u, Aqk v_new as dense products; w S, q S, kᵀ v_new; "
    "the triangular inverse"
)


@dataclass(frozen=True)
class Case:
    """One row of the table: H heads over sequences of these lengths, packed by cu_seqlens where there are several."""

    id: str
    H: int
    lengths: tuple[int, ...]
    K: int = 128
    V: int = 128

    operator: ClassVar[str] = "chunk_kda"

    @property
    def packed(self) -> bool:
        """Are there cu_seqlens?"""
        return len(self.lengths) > 1

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def chunks(self) -> Iterator[int]:
        """The tokens of each chunk."""
        return (min(CHUNK, length - start) for length in self.lengths for start in range(0, length, CHUNK))

    @property
    def moved_bytes(self) -> int:
        """Ideal traffic, by `BYTES_FORMULA`."""
        T, N, H, K, V = self.tokens, len(self.lengths), self.H, self.K, self.V
        bounds = 8 * (N + 1) if self.packed else 0
        return T * H * (3 * K + 2 * V + 1) * 2 + 8 * N * H * K * V + 4 * H * (K + 1) + bounds

    @property
    def flops(self) -> float:
        """Floating-point operations of the chunked form, by `FLOPS_FORMULA`."""
        K, V = self.K, self.V
        return self.H * math.fsum(C * C * (6 * K + 4 * V) + 6 * C * K * V + C**3 / 3 for C in self.chunks)

    def scaled_down(self) -> Case:
        """A version for a CPU: a 16th of the heads and a 32nd of the tokens, at least one of each."""
        lengths = tuple(max(1, length // 32) for length in self.lengths)
        return dataclasses.replace(self, H=max(1, self.H // 16), lengths=lengths)

    def inputs(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
        """Arguments of the operator in production form, drawn on the device: the CPU would take minutes at these sizes.

        q, k, v, raw gate and beta logits ~ N(0, 1) in `dtype`, `[1, T, H, ...]`; A_log = log U(1, 16) `[H]`, dt_bias
        `[H * K]` and the initial states `[N, H, V, K]` fp32; cu_seqlens int64 where several sequences are packed.
        """
        generator = torch.Generator(device).manual_seed(seed)
        N, H, K, V = len(self.lengths), self.H, self.K, self.V
        B = 1 if self.packed else N
        T = self.tokens // B

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        ends = torch.tensor((0, *self.lengths), device=device).cumsum(0)
        return {
            "q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V),
            "g": normal(B, T, H, K), "beta": normal(B, T, H),
            "initial_state": normal(N, H, V, K, dtype=torch.float32) * 0.1,
            "A_log": torch.empty(H, device=device).uniform_(1.0, 16.0, generator=generator).log(),
            "dt_bias": normal(H * K, dtype=torch.float32) - 4.0,
            "cu_seqlens": ends if self.packed else None,
            "lower_bound": LOWER_BOUND, "output_final_state": True, "state_v_first": True,
            "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        }  # fmt: skip


class Batch(Case):
    """A batch of sequences of one length, without cu_seqlens."""

    packed = False


class Decode(Case):
    """A decoding step: one token, or a few as in drafting, for each of many sequences, from states into new ones."""

    operator = "fused_recurrent_kda"
    packed = False

    @property
    def flops(self) -> float:
        """Floating-point operations of the recurrence, by `RECURRENT_FLOPS_FORMULA`."""
        return 7.0 * self.tokens * self.H * self.K * self.V

    def scaled_down(self) -> Decode:
        """A version for a CPU: a 16th of the heads and of the sequences, at least one of each."""
        return dataclasses.replace(self, H=max(1, self.H // 16), lengths=self.lengths[: -(-len(self.lengths) // 16)])


class Train(Case):
    """A step of training: the gradients of every input from one of o. It has no states."""

    @property
    def moved_bytes(self) -> int:
        """Ideal traffic of both passes, by `TRAINING_BYTES_FORMULA`: the backward pass reads the inputs once more and
        o's gradient, and writes theirs."""
        T, N, H, K, V = self.tokens, len(self.lengths), self.H, self.K, self.V
        bounds = 16 * (N + 1) if self.packed else 0
        return T * H * (9 * K + 5 * V + 3) * 2 + 12 * H * (K + 1) + bounds

    @property
    def flops(self) -> float:
        """Operations of both passes, by `TRAINING_FLOPS_FORMULA`; what is computed a second time does not count."""
        K, V = self.K, self.V
        backward = math.fsum(C * C * 8 * (K + V) + 12 * C * K * V for C in self.chunks)
        return super().flops + self.H * backward

    def inputs(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
        """As of the other cases, without states; the tensors that have a gradient require it."""
        inputs = super().inputs(device, dtype, seed) | {"initial_state": None, "output_final_state": False}
        for name in DIFFERENTIABLE:
            if inputs[name] is not None:
                inputs[name].requires_grad_()
        return inputs


UNEVEN = (40000, 10000, 9000, 6536)
MIXED = (1300, 547, 2048, 963, 271, 3063)
CASES: dict[str, Case] = {
    case.id: case
    for case in (
        *(Case(f"H{H}", H, (8192,)) for H in (96, 64, 32, 16)),
        *(Case(f"H{H}-mixed", H, MIXED) for H in (96, 64)),
        *(Case(f"H{H}-8x1024", H, (1024,) * 8) for H in (96, 64)),
        Case("H32-T32768", 32, (32768,)),
        Case("H8-T65536", 8, (65536,)),
        *(Case(f"T{T}", 32, (T,)) for T in (64, 128, 256, 512, 1024, 2048)),
        *(Decode(f"B{B}", 32, (1,) * B) for B in (1, 16, 64, 256)),
        *(Decode(f"B{B}x4", 32, (4,) * B) for B in (1, 16, 64, 256)),
        *(Train(f"train-H{H}", H, (8192,)) for H in (96, 64, 32, 16)),
        *(Train(f"train-H{H}-T32768", H, (32768,)) for H in (96, 64, 32, 16)),
        Train("train-H32-mixed", 32, MIXED),
        *(Case(f"few-H{H}-T{T}", H, (T,)) for H in (4, 8, 16) for T in (8192, 32768, 65536, 131072)),
        *(Case(f"few-H{H}-uneven", H, UNEVEN) for H in (4, 8, 16)),
        Case("few-H8-8x8192", 8, (8192,) * 8),
        *(Batch(f"few-H8-B{B}", 8, (8192,) * B) for B in (2, 4, 8)),
    )
}
TRAINING = tuple(id for id, case in CASES.items() if isinstance(case, Train))
"""These run where they are asked for: a backend that computes gradients by torch's formulas takes minutes for them."""
FEW_HEADS = tuple(id for id in CASES if id.startswith("few-"))
"""These run where they are asked for: as on one of several GPUs that share a model's heads."""
HOST_CASE = "T64"
"""The case whose host time is taken: short, so that the device never makes the host wait."""
PEER_CASES = (
    "H96", "H32", HOST_CASE, *(id for id, case in CASES.items() if isinstance(case, Decode)), "train-H96", "train-H32",
)  # fmt: skip
"""Where peers run unless cases are named: two head counts, as FLA tunes itself for minutes at each new one."""
