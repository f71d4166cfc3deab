"""Which stage is the first whose tensors are off: that is where a wrong result comes from."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .backward import BACKWARD_STAGES
from .compare import rel_rmse
from .stages import STAGES


def first_departure(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], limit: float) -> str | None:
    """The first of M1 to M4 and dM4 to dM1 with a tensor whose relative RMSE exceeds `limit`: stage, tensor and error.

    The tables are laid out as by `chunk_kda_stages` and `chunk_kda_backward_stages`, and may be the two merged. Names
    that one of them lacks are passed over. None if all the others agree.
    """
    for stage, names in (STAGES | BACKWARD_STAGES).items():
        for name in names:
            if name in actual and name in expected and not (error := rel_rmse(actual[name], expected[name])) <= limit:
                return f"{stage} ({name}, relative RMSE {error:.2e})"
    return None
