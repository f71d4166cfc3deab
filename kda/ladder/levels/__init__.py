"""The ladder from linear attention to KDA, one mechanism a level, in fp64: what teaches is also what is tested.

| level | recurrence, then o = qᵀ S                          | what is new                         | built on |
|-------|----------------------------------------------------|-------------------------------------|----------|
| 1     | S <- S + k vᵀ                                      | the state, and its chunked form     |          |
| 2     | S <- exp(g) S + k vᵀ                               | one decay a head                    | 1        |
| 3     | S <- diag(exp g_t) S + k vᵀ                        | a decay for every token and channel | 2        |
| 4     | S <- S + beta k (v - kᵀ S)ᵀ                        | the delta rule                      | 1        |
| 5     | S <- diag(exp g_t) S, S <- S + beta k (v - kᵀ S)ᵀ  | both together: KDA                  | 3, 4     |

Levels 1 to 4 are `level1` to `level4`, each with form A, `recurrent`, token by token, and form B, `chunked`; level 1
has two more, which mirror the grids of its two kernels. Level 5 is `kda.golden` itself: its token recurrence is form A,
its stages M1 to M4 are form B.

Everywhere q, k are `[B, N, H, K]` and v, o `[B, N, H, V]`, of any float dtypes; the arithmetic and o are fp64. q is not
scaled. N is any length: a last chunk that is not full is filled up with zeros, which write nothing to the state.
"""

from . import level1, level2, level3, level4

__all__ = ["level1", "level2", "level3", "level4"]
