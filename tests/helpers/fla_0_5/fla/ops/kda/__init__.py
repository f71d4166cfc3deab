from . import gate
from .chunk import chunk_kda
from .fused_recurrent import fused_recurrent_kda_fwd

__all__ = ["chunk_kda", "fused_recurrent_kda_fwd", "gate"]
