"""dM2: from the gradients of Aqk and Akk to those of q, k and the decays, exact at every gate in [-inf, 0].

With E_ij = Π(j < t <= i) a_t per channel, e_i = Π(t <= i) a_t and D the chunk's whole decay, and k⁺ the key as it
stands in a row of Akk (before beta), k⁻ as it stands in a column of Aqk or Akk, or in kg:

    [dq; dk⁺]_i = e_i R_i + Σ_j P_ij E_ij k_j         dk⁻_j = (D / e)_j Z_j + Σ_i E_ij (Pq_ij q_i + Pk_ij beta_i k_i)

E is never formed, and nothing is divided by a decay. A chunk is cut into four blocks of 16 rows. Pairs of rows in
different blocks are parted at the chunk's middle (level 32) or at that of its half (level 16):
E_ij = (from the middle to i)(from j to the middle), two factors <= 1 of 16-bit operands, and the two levels are one
product of a block-diagonal matrix. The pairs of rows in one block are taken one by one, in fp32, with a decay that is
carried along. A thread owns one block's rows of two channels.

The gradient of a token's log decay is what flows across it: the terms of all pairs j < t <= i. Pairs of different
blocks, and those with S or S', are added up from the outside in: a row's terms from it on to the block's start, a
column's to the block's end, and what passes over a whole block by level. In no such sum do large terms cancel, so that
a token whose gate is closed doesn't get the rounding of its neighbours. Within a block the sums are differences, in
fp32.
"""

from typing import Any

import tilelang.language as T

from kda.golden.constants import CHUNK_SIZE as C
from kda.golden.constants import SUB_BLOCK as SUB

HALF = C // 2
BLOCKS = C // SUB


@T.macro
def place_scores(P: Any, within_s: Any, levels_s: Any, row_s: Any):
    """Spreads P [2 C, C], q's rows over k's, to where it is read.

    within_s [BLOCKS, SUB, SUB, 2]: the pairs within a block, q's and k's beside each other. row_s[:, 3]: the diagonal
    of q's. levels_s [2 C, C]: level 32 above on the left, level 16 below on the right, each with its right rows of q
    over those of k, and its left rows as columns.
    """
    low = T.alloc_fragment(P.shape, levels_s.dtype)
    T.copy(P, low)
    for i, j in T.Parallel(2 * C, C):
        levels_s[i, j] = T.cast(0, levels_s.dtype)
    T.sync_threads()
    for i, j in T.Parallel(2 * C, C):
        if T.And(i % C // SUB == j // SUB, i % C > j):
            within_s[j // SUB, i % SUB, j % SUB, i // C] = P[i, j]
    for i, j in T.Parallel(2 * C, C):
        if i == j:
            row_s[j, 3] = P[i, j]
    for i, j in T.Parallel(2 * C, C):
        if T.And(i % C >= HALF, j < HALF):
            levels_s[i // C * HALF + i % HALF, j] = low[i, j]
    for i, j in T.Parallel(2 * C, C):
        if T.And(i // SUB % 2 == 1, i % C // SUB == j // SUB + 1):
            levels_s[C + i // HALF * SUB + i % SUB, HALF + j // HALF * SUB + j % SUB] = low[i, j]


@T.macro
def level_operands(a: Any, log2_block_s: Any, qk_s: Any, row_s: Any, right_s: Any, left_s: Any):
    """The operands of both levels: right rows (q's over those of beta k, level 32 above) and left rows of k."""
    f32, dtype, shape = "float32", right_s.dtype, (BLOCKS, a.shape[2])
    run = T.alloc_fragment(shape, f32)
    far = T.alloc_fragment(shape, f32)  # from the block's border to the chunk's middle
    x = T.alloc_fragment(shape, f32)
    near_q = T.alloc_fragment(shape, dtype)
    near_k = T.alloc_fragment(shape, dtype)
    far_q = T.alloc_fragment(shape, dtype)
    far_k = T.alloc_fragment(shape, dtype)
    for b, c in T.Parallel(*shape):
        far[b, c] = T.if_then_else(b == 3, T.exp2(log2_block_s[2, c]), 1.0)
    T.fill(run, 1.0)
    for r in T.unroll(SUB):
        # Rounded first: TileLang 0.1.15 loses the condition of a store that rounds.
        for b, c in T.Parallel(*shape):
            run[b, c] = run[b, c] * a[r, b, c]
            x[b, c] = T.cast(qk_s[b * SUB + r, c], f32) * (run[b, c] * row_s[b * SUB + r, 0])
            near_q[b, c] = x[b, c]
            far_q[b, c] = x[b, c] * far[b, c]
            x[b, c] = T.cast(qk_s[C + b * SUB + r, c], f32) * (
                run[b, c] * (row_s[b * SUB + r, 1] * row_s[b * SUB + r, 2])
            )
            near_k[b, c] = x[b, c]
            far_k[b, c] = x[b, c] * far[b, c]
        for b, c in T.Parallel(*shape):
            if b >= 2:
                right_s[(b - 2) * SUB + r, c] = far_q[b, c]
                right_s[HALF + (b - 2) * SUB + r, c] = far_k[b, c]
        for b, c in T.Parallel(*shape):
            if b % 2 == 1:
                right_s[C + b // 2 * SUB + r, c] = near_q[b, c]
                right_s[C + HALF + b // 2 * SUB + r, c] = near_k[b, c]
    for b, c in T.Parallel(*shape):
        far[b, c] = T.if_then_else(b == 0, T.exp2(log2_block_s[1, c]), 1.0)
    T.fill(run, 1.0)
    for s in T.unroll(SUB):
        for b, c in T.Parallel(*shape):
            x[b, c] = T.cast(qk_s[C + b * SUB + SUB - 1 - s, c], f32) * (run[b, c] * row_s[b * SUB + SUB - 1 - s, 1])
            near_k[b, c] = x[b, c]
            far_k[b, c] = x[b, c] * far[b, c]
            run[b, c] = run[b, c] * a[SUB - 1 - s, b, c]
        for b, c in T.Parallel(*shape):
            if b < 2:
                left_s[b * SUB + SUB - 1 - s, c] = far_k[b, c]
        for b, c in T.Parallel(*shape):
            if b % 2 == 0:
                left_s[HALF + b // 2 * SUB + SUB - 1 - s, c] = near_k[b, c]


@T.macro
def gather_rows(
    a: Any, log2_block_s: Any, qk_s: Any, row_s: Any, within_s: Any, levels_s: Any, out_s: Any, flow: Any,
    border: Any, cross: Any,
):  # fmt: skip
    """dq and dk⁺ of every row, in place of R in out_s [2 C, K]; levels_s: the levels' products for right rows.

    flow [SUB, BLOCKS, K]: each row's terms. border and cross [BLOCKS, K]: their sums over a block, of S's terms and of
    level 32's.
    """
    f32, shape = "float32", (BLOCKS, a.shape[2])
    run = T.alloc_fragment(shape, f32)
    lead = T.alloc_fragment(shape, f32)
    far = T.alloc_fragment(shape, f32)
    q = T.alloc_fragment(shape, f32)
    k = T.alloc_fragment(shape, f32)
    k_beta = T.alloc_fragment(shape, f32)
    dq = T.alloc_fragment(shape, f32)
    dk = T.alloc_fragment(shape, f32)
    far_q = T.alloc_fragment(shape, f32)
    far_k = T.alloc_fragment(shape, f32)
    decayed = T.alloc_fragment((SUB, *shape), f32)  # earlier keys of the block, as they are at this row
    for b, c in T.Parallel(*shape):
        lead[b, c] = T.exp2(
            T.if_then_else(b > 0, log2_block_s[0, c], 0.0)
            + T.if_then_else(b > 1, log2_block_s[1, c], 0.0)
            + T.if_then_else(b > 2, log2_block_s[2, c], 0.0)
        )
        far[b, c] = T.if_then_else(b == 3, T.exp2(log2_block_s[2, c]), 1.0)
    T.clear(border)
    T.clear(cross)
    T.clear(decayed)
    T.fill(run, 1.0)
    for r in T.unroll(SUB):
        for b, c in T.Parallel(*shape):
            run[b, c] = run[b, c] * a[r, b, c]
            q[b, c] = T.cast(qk_s[b * SUB + r, c], f32) * row_s[b * SUB + r, 0]
            k[b, c] = T.cast(qk_s[C + b * SUB + r, c], f32) * row_s[b * SUB + r, 1]
            k_beta[b, c] = k[b, c] * row_s[b * SUB + r, 2]
            dq[b, c] = out_s[b * SUB + r, c] * (run[b, c] * lead[b, c])
            dk[b, c] = out_s[C + b * SUB + r, c] * (run[b, c] * lead[b, c])
            border[b, c] = border[b, c] + q[b, c] * dq[b, c] + k_beta[b, c] * dk[b, c]
            far_q[b, c] = T.if_then_else(b >= 2, levels_s[(b - 2) * SUB + r, c], 0.0) * (run[b, c] * far[b, c])
            far_k[b, c] = T.if_then_else(b >= 2, levels_s[HALF + (b - 2) * SUB + r, c], 0.0) * (run[b, c] * far[b, c])
            cross[b, c] = cross[b, c] + q[b, c] * far_q[b, c] + k_beta[b, c] * far_k[b, c]
            dq[b, c] = (
                dq[b, c] + far_q[b, c] + run[b, c] * T.if_then_else(b % 2 == 1, levels_s[C + b // 2 * SUB + r, c], 0.0)
            )
            dk[b, c] = (
                dk[b, c]
                + far_k[b, c]
                + run[b, c] * T.if_then_else(b % 2 == 1, levels_s[C + HALF + b // 2 * SUB + r, c], 0.0)
            )
        for j in T.unroll(SUB):
            if j < r:
                for b, c in T.Parallel(*shape):
                    decayed[j, b, c] = decayed[j, b, c] * a[r, b, c]
                    dq[b, c] = dq[b, c] + within_s[b, r, j, 0] * decayed[j, b, c]
                    dk[b, c] = dk[b, c] + within_s[b, r, j, 1] * decayed[j, b, c]
        for b, c in T.Parallel(*shape):
            decayed[r, b, c] = k[b, c]
            flow[r, b, c] = q[b, c] * dq[b, c] + k_beta[b, c] * dk[b, c]
            out_s[b * SUB + r, c] = dq[b, c] + row_s[b * SUB + r, 3] * k[b, c]
            out_s[C + b * SUB + r, c] = dk[b, c]


@T.macro
def gather_columns(
    a: Any, log2_block_s: Any, qk_s: Any, row_s: Any, within_s: Any, levels_s: Any, z_s: Any, out_s: Any,
    flow: Any, total: Any, border: Any, cross: Any,
):  # fmt: skip
    """dk⁻ of every column to out_s [C, K] fp32, from Z in z_s and the levels' products for left rows in levels_s.

    flow + total become the gradient of the log decay, but for what passes over the block; border and cross: as
    `gather_rows` has them, of the columns' terms with S' and of level 32's.
    """
    f32, shape = "float32", (BLOCKS, a.shape[2])
    run = T.alloc_fragment(shape, f32)
    lead = T.alloc_fragment(shape, f32)
    far = T.alloc_fragment(shape, f32)
    q = T.alloc_fragment(shape, f32)
    k = T.alloc_fragment(shape, f32)
    k_beta = T.alloc_fragment(shape, f32)
    dk = T.alloc_fragment(shape, f32)
    far_k = T.alloc_fragment(shape, f32)
    sums = T.alloc_fragment(shape, f32)
    within = T.alloc_fragment((SUB, *shape), f32)  # the sums over the rows so far, decayed back to this one
    for b, c in T.Parallel(*shape):
        lead[b, c] = T.exp2(
            T.if_then_else(b < 1, log2_block_s[1, c], 0.0)
            + T.if_then_else(b < 2, log2_block_s[2, c], 0.0)
            + T.if_then_else(b < 3, log2_block_s[3, c], 0.0)
        )
        far[b, c] = T.if_then_else(b == 0, T.exp2(log2_block_s[1, c]), 1.0)
    T.clear(border)
    T.clear(cross)
    T.clear(total)
    T.clear(sums)
    T.clear(within)
    T.fill(run, 1.0)
    for s in T.unroll(SUB):
        for b, c in T.Parallel(*shape):
            q[b, c] = T.cast(qk_s[b * SUB + SUB - 1 - s, c], f32) * row_s[b * SUB + SUB - 1 - s, 0]
            k[b, c] = T.cast(qk_s[C + b * SUB + SUB - 1 - s, c], f32) * row_s[b * SUB + SUB - 1 - s, 1]
            k_beta[b, c] = k[b, c] * row_s[b * SUB + SUB - 1 - s, 2]
            dk[b, c] = T.cast(z_s[b * SUB + SUB - 1 - s, c], f32) * (run[b, c] * lead[b, c])
            border[b, c] = border[b, c] + k[b, c] * dk[b, c]
            far_k[b, c] = T.if_then_else(b < 2, T.cast(levels_s[b * SUB + SUB - 1 - s, c], f32), 0.0) * (
                run[b, c] * far[b, c]
            )
            cross[b, c] = cross[b, c] + k[b, c] * far_k[b, c]
            dk[b, c] = (
                dk[b, c]
                + far_k[b, c]
                + run[b, c]
                * T.if_then_else(b % 2 == 0, T.cast(levels_s[HALF + b // 2 * SUB + SUB - 1 - s, c], f32), 0.0)
            )
            total[b, c] = total[b, c] + k[b, c] * dk[b, c]
            dk[b, c] = dk[b, c] + within[SUB - 1 - s, b, c]
            sums[b, c] = sums[b, c] + flow[SUB - 1 - s, b, c] - k[b, c] * dk[b, c]
            flow[SUB - 1 - s, b, c] = sums[b, c]
            out_s[b * SUB + SUB - 1 - s, c] = dk[b, c] + row_s[b * SUB + SUB - 1 - s, 3] * q[b, c]
            run[b, c] = run[b, c] * a[SUB - 1 - s, b, c]
        for j in T.unroll(SUB):
            if j < SUB - 1 - s:
                for b, c in T.Parallel(*shape):
                    within[j, b, c] = a[SUB - 1 - s, b, c] * (
                        within[j, b, c]
                        + within_s[b, SUB - 1 - s, j, 0] * q[b, c]
                        + within_s[b, SUB - 1 - s, j, 1] * k_beta[b, c]
                    )


@T.macro
def add_passing(passing_s: Any, part_s: Any, log2_block_s: Any, total: Any):
    """total += what passes over each block as a whole: from S or an earlier block to a later one or S'."""
    for b, c in T.Parallel(*total.shape):
        total[b, c] = (
            total[b, c]
            + T.if_then_else(b < 1, passing_s[0, 1, c], 0.0)
            + T.if_then_else(b < 2, passing_s[0, 2, c], 0.0)
            + T.if_then_else(b < 3, passing_s[0, 3, c], 0.0)
            + T.if_then_else(b > 0, passing_s[2, 0, c], 0.0)
            + T.if_then_else(b > 1, passing_s[2, 1, c], 0.0)
            + T.if_then_else(b > 2, passing_s[2, 2, c], 0.0)
            + T.if_then_else(b == 1, passing_s[3, 0, c], 0.0)
            + T.if_then_else(b == 2, passing_s[1, 3, c], 0.0)
            + ((part_s[0, c] + part_s[1, c]) + (part_s[2, c] + part_s[3, c]))
            * T.exp2(log2_block_s[0, c] + log2_block_s[1, c] + log2_block_s[2, c] + log2_block_s[3, c])
        )
