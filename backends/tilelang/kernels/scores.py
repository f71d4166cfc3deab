"""M2, the decayed products inside a chunk, by bisection: exact at every gate, with tensor cores alone.

Wanted, for j < i in a chunk and decays a_t in [0, 1] per channel:  P_ij = Σ_c x_i y_j Π(j < t <= i) a_t

There is exactly one s in 32, 16, 8, 4, 2, 1 for which j lies in the left and i in the right half of the same group of
2s rows. With the group's middle m as pivot,

    Π(j < t <= i) a_t = Π(m <= t <= i) a_t · Π(j < t < m) a_t

so that each s, a level, is one product of a tile of right rows with a tile of left rows, of which the s x s blocks on
its diagonal count. Both factors are products of decays: neither exceeds 1 and no exponents are subtracted, so every g
in [-inf, 0] comes out right, -1000 next to -1e-3 included, without a second path for strong gates; and no bit of row i
depends on a later row.

Packing: right row (2n + 1) s + r and left row 2n s + r of group n are both row n s + r of their tiles.
"""

from typing import Any

import tilelang.language as T

from kda.golden.constants import CHUNK_SIZE

HALF = CHUNK_SIZE // 2
QUARTER = CHUNK_SIZE // 4
LEVELS_WITHIN_HALVES = (16, 8, 4, 2, 1)


def norm(norms: Any, row: Any) -> Any:
    """What turns a unit row back into the row it came from; 1 where norms is None."""
    return 1.0 if norms is None else norms[row]


@T.macro
def level_operands(s: int, a: Any, q_s: Any, k_s: Any, run: Any, factor: Any, right_s: Any, left_s: Any):
    """right_s [64, K] = q, then k, of the right rows, decayed from the middle on; left_s [32, K] = k of the left rows,
    decayed up to the middle. a [32, 2, K] holds the decays of row 32 h + r at [r, h]; s <= 16."""
    K = q_s.shape[1]
    for n in T.unroll(QUARTER // s):
        T.fill(run, 1.0)
        for r in T.unroll(s):
            for h, c in T.Parallel(2, K):
                run[h, c] = run[h, c] * a[(2 * n + 1) * s + r, h, c]
                factor[h, c] = run[h, c]
                right_s[h * QUARTER + n * s + r, c] = q_s[h * HALF + (2 * n + 1) * s + r, c] * factor[h, c]
                right_s[h * QUARTER + n * s + r + HALF, c] = k_s[h * HALF + (2 * n + 1) * s + r, c] * factor[h, c]
        T.fill(run, 1.0)
        for r in T.unroll(s):
            for h, c in T.Parallel(2, K):
                factor[h, c] = run[h, c]
                left_s[h * QUARTER + (n + 1) * s - 1 - r, c] = k_s[h * HALF + (2 * n + 1) * s - 1 - r, c] * factor[h, c]
                run[h, c] = run[h, c] * a[(2 * n + 1) * s - 1 - r, h, c]


@T.macro
def store_level(
    s: int, level: Any, scale: Any, q_norm: Any, k_norm: Any, beta_s: Any, aqk_level: Any, aqk_s: Any, akk_s: Any
):
    """Put the diagonal blocks of `level` [64, 32], q's and k's products, where they belong in Aqk and in Akk's two
    diagonal blocks.

    Rounded first and stored under the condition afterwards: TileLang 0.1.15 loses the condition of a store that rounds.
    """
    for i, j in T.Parallel(HALF, HALF):
        aqk_level[i, j] = level[i, j] * (scale * norm(q_norm, i + i // s * s + s) * norm(k_norm, j + j // s * s))
    for i, j in T.Parallel(HALF, HALF):
        if i // s == j // s:
            aqk_s[i + i // s * s + s, j + j // s * s] = aqk_level[i, j]
    for i, j in T.Parallel(HALF, HALF):
        if i // s == j // s:
            akk_s[i // QUARTER, (i + i // s * s + s) % HALF, (j + j // s * s) % HALF] = (
                level[HALF + i, j]
                * beta_s[i + i // s * s + s]
                * (norm(k_norm, i + i // s * s + s) * norm(k_norm, j + j // s * s))
            )
