"""dM3: what the products of whole tiles give, and the sums over V.

With Y = [do; -db], the rows of do over those of -db:

    P = Y v_newᵀ      the gradients of Aqk (j <= i) and of Akk without beta (j < i)
    R = Y Sᵀ          the gradients of q exp G and of beta k exp G
    Z = v_new dS'ᵀ    the gradient of kg;  S enters the chunk, dS' is the gradient of the state that leaves it
    dv = beta db      v · db, which is v's part of dbeta      Σ_V S dS', which is that of the chunk's decay
"""

from typing import Any

import tilelang.language as T

from kda.golden.constants import CHUNK_SIZE as C

from .scores import BLOCKS


@T.macro
def sum_over_states(h_s: Any, dh_s: Any, part: Any):
    """part [BLOCKS, K]: Σ_V S dS' by quarters of V, from hᵀ and dhᵀ [V, K]."""
    rows = h_s.shape[0] // BLOCKS
    T.clear(part)
    for r in T.unroll(rows):
        for b, c in T.Parallel(*part.shape):
            part[b, c] = part[b, c] + T.cast(h_s[b * rows + r, c], "float32") * T.cast(dh_s[b * rows + r, c], "float32")


@T.macro
def through_v(v_s: Any, y_s: Any, row_s: Any, t0: Any, rows: Any, hv: Any, v_dot_ndb: Any, dv: Any):
    """Stores dv, and sets v_dot_ndb [C] to v · (-db)."""
    product = T.alloc_fragment(v_s.shape, "float32")
    low = T.alloc_fragment(v_s.shape, dv.dtype)
    for i, c in T.Parallel(*v_s.shape):
        product[i, c] = T.cast(v_s[i, c], "float32") * T.cast(y_s[C + i, c], "float32")
        low[i, c] = -row_s[i, 2] * T.cast(y_s[C + i, c], "float32")
    T.reduce_sum(product, v_dot_ndb, dim=1)
    for i, c in T.Parallel(*v_s.shape):
        if i < rows:
            dv[t0 + i, hv, c] = low[i, c]
