"""dM2: from the gradients of Aqk and Akk to those of q, k and the decays, exact at every gate in [-inf, 0].

With E_ij = Π(j < t <= i) a_t per channel, e_i = Π(t <= i) a_t and D the chunk's whole decay, and k⁺ the key as it
stands in a row of Akk (before beta), k⁻ as it stands in a column of Aqk or Akk, or in kg:

    [dq; dk⁺]_i = e_i R_i + Σ_j P_ij E_ij k_j         dk⁻_j = (D / e)_j Z_j + Σ_i E_ij (Pq_ij q_i + Pk_ij beta_i k_i)

E is never formed, and nothing is divided by a decay. A chunk is cut into blocks of ROWS = 8 rows. Pairs of rows in
different blocks are parted at the middle of the chunk, of its half or of its quarter (level 32, 16 or 8), whichever is
between them: E_ij = (from the middle to i)(from j to the middle), two factors <= 1 of 16-bit operands. At each level
half of the rows are right of a middle and half are left of it. Levels 32 and 16 are one product of a block-diagonal
matrix, level 8 is another. The pairs of rows in one block are taken one by one, in fp32, with a decay that is carried
along. A thread owns one block's rows of two channels, and a warp has rows of one block.

The gradient of a token's log decay is what flows across it: the terms of all pairs j < t <= i. Pairs of different
blocks, and those with S or S', are added up from the outside in: a row's terms from it on to the block's start, a
column's to the block's end, and what passes over a whole block by level. In no such sum do large terms cancel, so that
a token whose gate is closed doesn't get the rounding of its neighbours. Within a block the sums are differences, in
fp32.
"""

from typing import Any

import tilelang.language as T

from kda.golden.constants import CHUNK_SIZE as C

ROWS = 8
BLOCKS = C // ROWS
HALF = C // 2  # rows that are right of a level's middles, and those that are left of them


@T.macro
def place_scores(P: Any, within_s: Any, levels_s: Any, level_8_s: Any, row_s: Any):
    """Spreads P [2 C, C], q's rows over k's, to where it is read.

    within_s [BLOCKS, ROWS, ROWS, 2]: the pairs within a block, q's and k's beside each other. row_s[:, 3]: the diagonal
    of q's. levels_s [2 C, C]: level 32 above on the left, level 16 below on the right, each with its right rows of q
    over those of k, and its left rows as columns. level_8_s [C, C]: level 8 likewise, on the left.
    """
    low = T.alloc_fragment(P.shape, levels_s.dtype)
    T.copy(P, low)
    for i, j in T.Parallel(2 * C, C):
        levels_s[i, j] = T.cast(0, levels_s.dtype)
    for i, j in T.Parallel(C, C):
        level_8_s[i, j] = T.cast(0, level_8_s.dtype)
    T.sync_threads()
    for i, j in T.Parallel(2 * C, C):
        if T.And(i % C // ROWS == j // ROWS, i % C > j):
            within_s[j // ROWS, i % ROWS, j % ROWS, i // C] = P[i, j]
    for i, j in T.Parallel(2 * C, C):
        if i == j:
            row_s[j, 3] = P[i, j]
    for i, j in T.Parallel(2 * C, C):
        if T.And(i % C >= HALF, j < HALF):
            levels_s[i // C * HALF + i % HALF, j] = low[i, j]
    for i, j in T.Parallel(2 * C, C):
        if T.And(i // 16 % 2 == 1, i % C // 16 == j // 16 + 1):
            levels_s[C + i // HALF * 16 + i % 16, HALF + j // HALF * 16 + j % 16] = low[i, j]
    for i, j in T.Parallel(2 * C, C):
        if T.And(i // 8 % 2 == 1, i % C // 8 == j // 8 + 1):
            level_8_s[i // 16 * 8 + i % 8, j // 16 * 8 + j % 8] = low[i, j]


@T.macro
def decay_outside(log2_block_s: Any, before: bool, outside: Any):
    """outside [BLOCKS, K]: the decay of all blocks before a block, or of all behind it."""
    T.clear(outside)
    for x in T.unroll(BLOCKS):
        for b, c in T.Parallel(BLOCKS, outside.shape[1]):
            if (x < b) if before else (x > b):
                outside[b, c] = outside[b, c] + log2_block_s[x, c]
    for b, c in T.Parallel(BLOCKS, outside.shape[1]):
        outside[b, c] = T.exp2(outside[b, c])


@T.macro
def decay_between(log2_block_s: Any, far_32: Any, far_16: Any):
    """[BLOCKS, K]: the decay of the blocks between a block and the chunk's middle, and its half's."""
    T.clear(far_32)
    T.clear(far_16)
    for x in T.unroll(BLOCKS):
        for b, c in T.Parallel(BLOCKS, far_32.shape[1]):
            if _between(x, b, 4):
                far_32[b, c] = far_32[b, c] + log2_block_s[x, c]
    for b, c in T.Parallel(BLOCKS, far_32.shape[1]):
        if b % 4 == 0:
            far_16[b, c] = log2_block_s[b + 1, c]
        if b % 4 == 3:
            far_16[b, c] = log2_block_s[b - 1, c]
        far_32[b, c] = T.exp2(far_32[b, c])
        far_16[b, c] = T.exp2(far_16[b, c])


def _between(x: Any, b: Any, middle: int) -> Any:
    """Whether block x lies between block b and the middle, which is the border before the block of that number."""
    return T.Or(T.And(b < x, x < middle), T.And(middle <= x, x < b))


@T.macro
def level_operands(
    a: Any, log2_block_s: Any, qk_s: Any, row_s: Any, right_s: Any, left_s: Any, right_8_s: Any, left_8_s: Any
):
    """The operands of the levels: right rows (q's over those of beta k) and left rows of k, where P's are."""
    f32, dtype, shape = "float32", right_s.dtype, (BLOCKS, a.shape[2])
    run = T.alloc_fragment(shape, f32)
    x = T.alloc_fragment(shape, f32)
    y = T.alloc_fragment(shape, f32)
    x_low = T.alloc_fragment(shape, dtype)
    y_low = T.alloc_fragment(shape, dtype)
    far_32 = T.alloc_fragment(shape, f32)
    far_16 = T.alloc_fragment(shape, f32)
    decay_between(log2_block_s, far_32, far_16)
    T.fill(run, 1.0)
    for r in T.unroll(ROWS):
        # Rounded first: TileLang 0.1.15 loses the condition of a store that rounds.
        for b, c in T.Parallel(*shape):
            run[b, c] = run[b, c] * a[r, b, c]
            x[b, c] = T.cast(qk_s[b * ROWS + r, c], f32) * (run[b, c] * row_s[b * ROWS + r, 0])
            y[b, c] = T.cast(qk_s[C + b * ROWS + r, c], f32) * (
                run[b, c] * (row_s[b * ROWS + r, 1] * row_s[b * ROWS + r, 2])
            )
        for b, c in T.Parallel(*shape):
            x_low[b, c] = x[b, c] * far_32[b, c]
            y_low[b, c] = y[b, c] * far_32[b, c]
        for b, c in T.Parallel(*shape):
            if b >= 4:
                right_s[(b - 4) * ROWS + r, c] = x_low[b, c]
                right_s[HALF + (b - 4) * ROWS + r, c] = y_low[b, c]
        for b, c in T.Parallel(*shape):
            x_low[b, c] = x[b, c] * far_16[b, c]
            y_low[b, c] = y[b, c] * far_16[b, c]
        for b, c in T.Parallel(*shape):
            if b % 4 >= 2:
                right_s[C + b // 4 * 16 + b % 2 * ROWS + r, c] = x_low[b, c]
                right_s[C + HALF + b // 4 * 16 + b % 2 * ROWS + r, c] = y_low[b, c]
        for b, c in T.Parallel(*shape):
            x_low[b, c] = x[b, c]
            y_low[b, c] = y[b, c]
        for b, c in T.Parallel(*shape):
            if b % 2 == 1:
                right_8_s[b // 2 * ROWS + r, c] = x_low[b, c]
                right_8_s[HALF + b // 2 * ROWS + r, c] = y_low[b, c]
    T.fill(run, 1.0)
    for s in T.unroll(ROWS):
        for b, c in T.Parallel(*shape):
            x[b, c] = T.cast(qk_s[C + b * ROWS + ROWS - 1 - s, c], f32) * (
                run[b, c] * row_s[b * ROWS + ROWS - 1 - s, 1]
            )
            run[b, c] = run[b, c] * a[ROWS - 1 - s, b, c]
        for b, c in T.Parallel(*shape):
            x_low[b, c] = x[b, c] * far_32[b, c]
        for b, c in T.Parallel(*shape):
            if b < 4:
                left_s[b * ROWS + ROWS - 1 - s, c] = x_low[b, c]
        for b, c in T.Parallel(*shape):
            x_low[b, c] = x[b, c] * far_16[b, c]
        for b, c in T.Parallel(*shape):
            if b % 4 < 2:
                left_s[HALF + b // 4 * 16 + b % 2 * ROWS + ROWS - 1 - s, c] = x_low[b, c]
        for b, c in T.Parallel(*shape):
            x_low[b, c] = x[b, c]
        for b, c in T.Parallel(*shape):
            if b % 2 == 0:
                left_8_s[b // 2 * ROWS + ROWS - 1 - s, c] = x_low[b, c]


@T.macro
def gather_rows(
    a: Any, log2_block_s: Any, qk_s: Any, row_s: Any, within_s: Any, levels_s: Any, level_8_s: Any,
    out_s: Any, border: Any, cross_32: Any, cross_16: Any,
):  # fmt: skip
    """dq and dk⁺ of every row, but for q's pair with its own key, in place of R in out_s [2 C, K]; levels_s, level_8_s:
    the levels' products.

    border, cross_32 and cross_16 [BLOCKS, K]: what a block's rows add to the gradients of earlier blocks' log decays,
    by S's terms and by those levels'.
    """
    f32, shape = "float32", (BLOCKS, a.shape[2])
    run = T.alloc_fragment(shape, f32)
    q = T.alloc_fragment(shape, f32)
    k = T.alloc_fragment(shape, f32)
    k_beta = T.alloc_fragment(shape, f32)
    dq = T.alloc_fragment(shape, f32)
    dk = T.alloc_fragment(shape, f32)
    far_q = T.alloc_fragment(shape, f32)
    far_k = T.alloc_fragment(shape, f32)
    decayed = T.alloc_fragment((ROWS, *shape), f32)  # earlier keys of the block, as they are at this row
    lead = T.alloc_fragment(shape, f32)
    far_32 = T.alloc_fragment(shape, f32)
    far_16 = T.alloc_fragment(shape, f32)
    decay_outside(log2_block_s, True, lead)
    decay_between(log2_block_s, far_32, far_16)
    T.clear(border)
    T.clear(cross_32)
    T.clear(cross_16)
    T.clear(decayed)
    T.fill(run, 1.0)
    for r in T.unroll(ROWS):
        for b, c in T.Parallel(*shape):
            run[b, c] = run[b, c] * a[r, b, c]
            q[b, c] = T.cast(qk_s[b * ROWS + r, c], f32) * row_s[b * ROWS + r, 0]
            k[b, c] = T.cast(qk_s[C + b * ROWS + r, c], f32) * row_s[b * ROWS + r, 1]
            k_beta[b, c] = k[b, c] * row_s[b * ROWS + r, 2]
            dq[b, c] = out_s[b * ROWS + r, c] * (run[b, c] * lead[b, c])
            dk[b, c] = out_s[C + b * ROWS + r, c] * (run[b, c] * lead[b, c])
            border[b, c] = border[b, c] + q[b, c] * dq[b, c] + k_beta[b, c] * dk[b, c]
        for b, c in T.Parallel(*shape):
            if b >= 4:
                far_q[b, c] = T.cast(levels_s[(b - 4) * ROWS + r, c], f32) * (run[b, c] * far_32[b, c])
                far_k[b, c] = T.cast(levels_s[HALF + (b - 4) * ROWS + r, c], f32) * (run[b, c] * far_32[b, c])
                cross_32[b, c] = cross_32[b, c] + q[b, c] * far_q[b, c] + k_beta[b, c] * far_k[b, c]
                dq[b, c] = dq[b, c] + far_q[b, c]
                dk[b, c] = dk[b, c] + far_k[b, c]
        for b, c in T.Parallel(*shape):
            if b % 4 >= 2:
                far_q[b, c] = T.cast(levels_s[C + b // 4 * 16 + b % 2 * ROWS + r, c], f32) * (run[b, c] * far_16[b, c])
                far_k[b, c] = T.cast(levels_s[C + HALF + b // 4 * 16 + b % 2 * ROWS + r, c], f32) * (
                    run[b, c] * far_16[b, c]
                )
                cross_16[b, c] = cross_16[b, c] + q[b, c] * far_q[b, c] + k_beta[b, c] * far_k[b, c]
                dq[b, c] = dq[b, c] + far_q[b, c]
                dk[b, c] = dk[b, c] + far_k[b, c]
        for b, c in T.Parallel(*shape):
            if b % 2 == 1:
                dq[b, c] = dq[b, c] + run[b, c] * T.cast(level_8_s[b // 2 * ROWS + r, c], f32)
                dk[b, c] = dk[b, c] + run[b, c] * T.cast(level_8_s[HALF + b // 2 * ROWS + r, c], f32)
        for j in T.unroll(ROWS):
            if j < r:
                for b, c in T.Parallel(*shape):
                    decayed[j, b, c] = decayed[j, b, c] * a[r, b, c]
                    dq[b, c] = dq[b, c] + within_s[b, r, j, 0] * decayed[j, b, c]
                    dk[b, c] = dk[b, c] + within_s[b, r, j, 1] * decayed[j, b, c]
        for b, c in T.Parallel(*shape):
            decayed[r, b, c] = k[b, c]
            out_s[b * ROWS + r, c] = dq[b, c]
            out_s[C + b * ROWS + r, c] = dk[b, c]


@T.macro
def gather_columns(
    a: Any, log2_block_s: Any, qk_s: Any, row_s: Any, within_s: Any, levels_s: Any, level_8_s: Any,
    z_s: Any, rows_s: Any, out_s: Any, flow: Any, total: Any, border: Any, cross_32: Any, cross_16: Any,
):  # fmt: skip
    """dk⁻ of every column to out_s [C, K] fp32, from Z in z_s and the levels' products in levels_s and level_8_s.

    rows_s [2 C, K]: dq and dk⁺, from which each row's terms are taken again. flow [ROWS, BLOCKS, K] + total become the
    gradient of the log decay, but for what passes over the block; border, cross_32, cross_16: as `gather_rows` has
    them, of the columns' terms with S' and of those levels'.
    """
    f32, shape = "float32", (BLOCKS, a.shape[2])
    run = T.alloc_fragment(shape, f32)
    q = T.alloc_fragment(shape, f32)
    k = T.alloc_fragment(shape, f32)
    k_beta = T.alloc_fragment(shape, f32)
    dk = T.alloc_fragment(shape, f32)
    far_k = T.alloc_fragment(shape, f32)
    sums = T.alloc_fragment(shape, f32)
    within = T.alloc_fragment((ROWS, *shape), f32)  # the sums over the rows so far, decayed back to this one
    tail = T.alloc_fragment(shape, f32)
    far_32 = T.alloc_fragment(shape, f32)
    far_16 = T.alloc_fragment(shape, f32)
    decay_outside(log2_block_s, False, tail)
    decay_between(log2_block_s, far_32, far_16)
    T.clear(border)
    T.clear(cross_32)
    T.clear(cross_16)
    T.clear(total)
    T.clear(sums)
    T.clear(within)
    T.fill(run, 1.0)
    for s in T.unroll(ROWS):
        for b, c in T.Parallel(*shape):
            q[b, c] = T.cast(qk_s[b * ROWS + ROWS - 1 - s, c], f32) * row_s[b * ROWS + ROWS - 1 - s, 0]
            k[b, c] = T.cast(qk_s[C + b * ROWS + ROWS - 1 - s, c], f32) * row_s[b * ROWS + ROWS - 1 - s, 1]
            k_beta[b, c] = k[b, c] * row_s[b * ROWS + ROWS - 1 - s, 2]
            dk[b, c] = T.cast(z_s[b * ROWS + ROWS - 1 - s, c], f32) * (run[b, c] * tail[b, c])
            border[b, c] = border[b, c] + k[b, c] * dk[b, c]
        for b, c in T.Parallel(*shape):
            if b < 4:
                far_k[b, c] = T.cast(levels_s[b * ROWS + ROWS - 1 - s, c], f32) * (run[b, c] * far_32[b, c])
                cross_32[b, c] = cross_32[b, c] + k[b, c] * far_k[b, c]
                dk[b, c] = dk[b, c] + far_k[b, c]
        for b, c in T.Parallel(*shape):
            if b % 4 < 2:
                far_k[b, c] = T.cast(levels_s[HALF + b // 4 * 16 + b % 2 * ROWS + ROWS - 1 - s, c], f32) * (
                    run[b, c] * far_16[b, c]
                )
                cross_16[b, c] = cross_16[b, c] + k[b, c] * far_k[b, c]
                dk[b, c] = dk[b, c] + far_k[b, c]
        for b, c in T.Parallel(*shape):
            if b % 2 == 0:
                dk[b, c] = dk[b, c] + run[b, c] * T.cast(level_8_s[b // 2 * ROWS + ROWS - 1 - s, c], f32)
        for b, c in T.Parallel(*shape):
            total[b, c] = total[b, c] + k[b, c] * dk[b, c]
            dk[b, c] = dk[b, c] + within[ROWS - 1 - s, b, c]
            sums[b, c] = sums[b, c] + (
                q[b, c] * rows_s[b * ROWS + ROWS - 1 - s, c]
                + k_beta[b, c] * rows_s[C + b * ROWS + ROWS - 1 - s, c]
                - k[b, c] * dk[b, c]
            )
            flow[ROWS - 1 - s, b, c] = sums[b, c]
            out_s[b * ROWS + ROWS - 1 - s, c] = dk[b, c] + row_s[b * ROWS + ROWS - 1 - s, 3] * q[b, c]
            run[b, c] = run[b, c] * a[ROWS - 1 - s, b, c]
        for j in T.unroll(ROWS):
            if j < ROWS - 1 - s:
                for b, c in T.Parallel(*shape):
                    within[j, b, c] = a[ROWS - 1 - s, b, c] * (
                        within[j, b, c]
                        + within_s[b, ROWS - 1 - s, j, 0] * q[b, c]
                        + within_s[b, ROWS - 1 - s, j, 1] * k_beta[b, c]
                    )


@T.macro
def add_passing(passing_s: Any, part_s: Any, log2_block_s: Any, total: Any):
    """total += what passes over each block as a whole: from S or an earlier block to a later one or S'.

    passing_s [6, BLOCKS, K]: border, cross_32 and cross_16 of the rows, then of the columns.
    """
    for x in T.unroll(BLOCKS):
        for b, c in T.Parallel(*total.shape):
            if x > b:
                total[b, c] = total[b, c] + passing_s[0, x, c]
            if x < b:
                total[b, c] = total[b, c] + passing_s[3, x, c]
            if _between(b, x, 4):
                total[b, c] = total[b, c] + passing_s[1 if x >= 4 else 4, x, c]
            if T.And(x // 4 == b // 4, _between(b % 4, x % 4, 2)):
                total[b, c] = total[b, c] + passing_s[2 if x % 4 >= 2 else 5, x, c]
    whole = T.alloc_fragment(total.shape, "float32")
    states = T.alloc_fragment(total.shape, "float32")
    T.clear(whole)
    T.clear(states)
    for x in T.unroll(BLOCKS):
        for b, c in T.Parallel(*total.shape):
            whole[b, c] = whole[b, c] + log2_block_s[x, c]
            states[b, c] = states[b, c] + part_s[x, c]
    for b, c in T.Parallel(*total.shape):
        total[b, c] = total[b, c] + T.exp2(whole[b, c]) * states[b, c]
