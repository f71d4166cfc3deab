"""M3, the WY form of a chunk: w = Ainv diag(beta) (k exp G) and u = Ainv diag(beta) v, each in place of its operand."""

from typing import Any

import tilelang.language as T


@T.macro
def corrections(step_s: Any, rest_s: Any, x_s: Any, width: int):
    """x_s [64, D] <- (step_s + rest_s) x_s, `width` columns at a time; rest_s may be None."""
    product = T.alloc_fragment((x_s.shape[0], width), "float32")
    for j in T.unroll(x_s.shape[1] // width):
        T.gemm(step_s, x_s[:, j * width : (j + 1) * width], product, clear_accum=True)
        if rest_s is not None:
            T.gemm(rest_s, x_s[:, j * width : (j + 1) * width], product)
        T.copy(product, x_s[:, j * width : (j + 1) * width])
