"""What level 1 costs by counting: per head of dimension D = K = V, N tokens in chunks of BC.

    causal attention     2 N² D          half of the N x N scores, and of their product with V
    linear attention     4 N D (D + BC)  read and write the state once a chunk, one BC x BC square of scores
    prefix, recomputed   NC (NC - 1)/2 · 2 BC D²,  NC = N/BC: every chunk sums up all that lies before it

The recomputed prefix over causal attention tends to D/(2 BC), whatever N: the same order, N². Linear attention over
causal attention is 2 (D + BC)/N.
"""

from __future__ import annotations

from dataclasses import dataclass

THREADS = 128
"""Threads of a block whose registers hold the state."""

STATE_BYTES = 2
"""Of one number of a state snapshot, which is kept in 16 bits."""


@dataclass(frozen=True)
class Ledger:
    """The account of one length; FLOPs of one head, bytes of all heads of one sequence."""

    N: int  # tokens
    D: int  # key and value channels of a head
    BC: int  # tokens of a chunk
    block_V: int  # columns of the state to a block
    heads: int

    @property
    def chunks(self) -> int:
        return -(-self.N // self.BC)

    @property
    def redundancy(self) -> float:
        """Products Kᵀ V per chunk where each chunk sums up its own prefix; carried along the sequence, it is 1."""
        return (self.chunks - 1) / 2

    @property
    def recomputed_flops(self) -> float:
        return self.chunks * self.redundancy * 2 * self.BC * self.D**2

    @property
    def linear_flops(self) -> float:
        return 4 * self.N * self.D * (self.D + self.BC)

    @property
    def attention_flops(self) -> float:
        return 2 * self.N**2 * self.D

    @property
    def recomputed_over_attention(self) -> float:
        return self.recomputed_flops / self.attention_flops

    @property
    def linear_over_attention(self) -> float:
        return self.linear_flops / self.attention_flops

    @property
    def recomputed_limit(self) -> float:
        """What `recomputed_over_attention` tends to as N grows."""
        return self.D / (2 * self.BC)

    @property
    def snapshot_bytes(self) -> int:
        """A state for every chunk, as a kernel writes them that leaves the output to another."""
        return self.chunks * self.heads * self.D**2 * STATE_BYTES

    @property
    def blocks(self) -> int:
        """Blocks that work side by side with the sequence in their loop."""
        return self.heads * self.tiles

    @property
    def tiles(self) -> int:
        """Tiles that the state's columns are cut into. Each of them reads all of q and k: the read amplification."""
        return -(-self.D // self.block_V)

    @property
    def state_registers(self) -> float:
        """Registers a thread for the state, fp32."""
        return self.D * min(self.block_V, self.D) / THREADS

    @property
    def score_registers(self) -> float:
        """Registers a thread for a chunk's BC x BC scores, fp32."""
        return self.BC**2 / THREADS
