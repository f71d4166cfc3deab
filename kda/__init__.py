"""Kimi Delta Attention (arXiv:2510.26692): `chunk_kda` for whole sequences, `fused_recurrent_kda` for decoding."""

from kda import backends
from kda.ops import chunk_kda, fused_recurrent_kda

__version__ = "0.2.0"
__all__ = ["backends", "chunk_kda", "fused_recurrent_kda"]
