"""flash-linear-attention's names for KDA over the operators of this package, and our place in its dispatch.

Names, order of arguments, defaults and layouts are those of flash-linear-attention (FLA) 0.5 and 0.6: states are
K-first unless `state_v_first`, and what only tunes FLA's own kernels is taken and ignored.
"""

from kda.fla.dispatch import register
from kda.fla.gate import fused_kda_gate
from kda.fla.layer import KimiDeltaAttention
from kda.fla.operators import chunk_kda, fused_recurrent_kda, fused_recurrent_kda_fwd

__all__ = [
    "KimiDeltaAttention",
    "chunk_kda",
    "fused_kda_gate",
    "fused_recurrent_kda",
    "fused_recurrent_kda_fwd",
    "register",
]
