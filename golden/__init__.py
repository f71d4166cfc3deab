"""The reference for every backend: the fp64 token recurrence, the stages forward and backward, inputs, a comparer."""

from . import inputs
from .backward import BACKWARD_STAGES, chunk_kda_backward_golden, chunk_kda_backward_stages
from .chunk import chunk_kda_golden, chunk_kda_stages
from .compare import Comparison, compare, rel_rmse
from .departure import first_departure
from .recurrent import recurrent_kda_golden
from .stages import STAGES

__all__ = [
    "BACKWARD_STAGES",
    "STAGES",
    "Comparison",
    "chunk_kda_backward_golden",
    "chunk_kda_backward_stages",
    "chunk_kda_golden",
    "chunk_kda_stages",
    "compare",
    "first_departure",
    "inputs",
    "recurrent_kda_golden",
    "rel_rmse",
]
