"""The reference that every backend is held to: the fp64 token recurrence, the stages M1-M4, inputs and a comparer."""

from . import inputs
from .chunk import chunk_kda_golden, chunk_kda_stages
from .compare import Comparison, compare, rel_rmse
from .recurrent import recurrent_kda_golden
from .stages import STAGES

__all__ = [
    "STAGES",
    "Comparison",
    "chunk_kda_golden",
    "chunk_kda_stages",
    "compare",
    "inputs",
    "recurrent_kda_golden",
    "rel_rmse",
]
