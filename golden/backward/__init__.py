"""The backward pass: the stages dM4 to dM1, each in the file of the forward stage that it goes back through."""

from .chunk import chunk_kda_backward_golden, chunk_kda_backward_stages
from .stages import BACKWARD_STAGES

__all__ = ["BACKWARD_STAGES", "chunk_kda_backward_golden", "chunk_kda_backward_stages"]
