"""M2 of a chunk whose decays are beyond the pivots of scores_pivoted: the same by bisection, right at every gate.

There is one size s = 2^level in 32, 16, 8, ... for which token j lies in the left and token i > j in the right block of
the same pair of blocks of s tokens. With the pair's border as pivot,

    exp(G_i - G_j) = exp(G_i - G_border) exp(G_border - G_j)

and both factors are at most 1: a size takes one product, of which the blocks below the borders count. Blocks of `fine`
and fewer tokens decay by less than the pivots' range; one more product, with their first tokens as pivots, ends it.

Rare, and the common way must not pay for it: the loops are rolled, and the decays are read again and wait in local
memory instead of registers.
"""

from typing import Any

import tilelang.language as T

from kda.golden.constants import SUB_BLOCK as SUB

from ..scores import HALF
from .activation import gate_bias, log2_decay, widen

ROWS = 4
"""Rows of q and k that a thread has in flight."""

GATES = 8
"""Rows of g that a thread has in flight: the largest block that is tried as `fine`."""

ROLLED = {"unroll_factor": 1}


def make_bisected_scores(
    K: int, dtype: str, g_dtype: str, use_gate: bool, use_qk_l2norm: bool, pivot_range: float
) -> Any:
    """Macro for four warps: fills c0 [64, 32] and c1 [64, 64] (of a half of the chunk, 32 rows of q over 32 rows of k,
    times the columns up to the half's end), writes qg and kg, and leaves k exp(G) in the k rows of x_in."""
    NV = K // 64  # channels of a thread: two warps share the rows of one sub-block, in both halves in turn
    f32, bf16 = "float32", "bfloat16"

    @T.macro
    def load_rows(x_in: Any, norm_s: Any, scale: Any, half: Any, warp: Any, kind: int, r: Any, ch: Any, x: Any):
        """x = rows r .. r + 3 of the sub-block, normalized and scaled; of q (kind 0) or k (1)."""
        raw = T.alloc_local((ROWS * NV,), dtype)
        for s in T.unroll(ROWS):
            for c in T.vectorized(NV):
                raw[s * NV + c] = x_in[half, kind * HALF + warp % 2 * SUB + r + s, ch + c]
        widen(raw, x)
        for s in T.unroll(ROWS):
            for c in T.unroll(NV):
                if use_qk_l2norm:
                    x[s * NV + c] = x[s * NV + c] * norm_s[half * 2 + warp % 2, kind, r + s]
                elif kind == 0:
                    x[s * NV + c] = x[s * NV + c] * scale

    def meets(i: Any, j: Any, level: Any, fine: Any) -> Any:
        """Does the product of this level bring row i and column j of a half together?"""
        neighbours = T.And((i >> level) & 1 == 1, (j >> level) + 1 == i >> level)
        return T.Select(level < fine, i >> fine == j >> fine, T.And(level < 5, neighbours))

    @T.macro
    def bisected_scores(
        g: Any, t0: Any, rows: Any, hv: Any, entry: Any, dt_bias: Any, factor: Any, scale: Any,
        x_in: Any, norm_s: Any, total_s: Any, k0_s: Any, k1_s: Any, c0: Any, c1: Any, table: Any, kg: int,
    ):  # fmt: skip
        warp = T.get_thread_binding() // 32
        sub = warp % 2 * SUB
        ch = warp // 2 * (K // 2) + T.get_thread_binding() % 32 * NV
        level = T.alloc_var("int32")
        size = T.alloc_var("int32")
        fine = T.alloc_var("int32")
        xq = T.alloc_local((ROWS * NV,), f32)
        xk = T.alloc_local((ROWS * NV,), f32)
        x_up = T.alloc_local((ROWS * NV,), f32)
        run = T.alloc_local((NV,), f32)
        edge = T.alloc_local((NV,), f32)

        # ---- decays, and the size from which on blocks are within the pivots' range
        decay = T.alloc_local((2 * SUB * NV,), f32)
        raw_g = T.alloc_local((GATES * NV,), g_dtype)
        x_g = T.alloc_local((GATES * NV,), f32)
        bias = T.alloc_local((NV,), f32)
        sums = T.alloc_local((3, NV), f32)
        least = T.alloc_local((3,), f32)
        for c in T.unroll(NV):
            bias[c] = gate_bias(factor, dt_bias[hv * K + ch + c], bounded=False) if use_gate else 0.0
        for i in T.unroll(3):
            least[i] = 0.0
        for n in T.unroll(2 * SUB // GATES, **ROLLED):
            first = n // 2 * HALF + sub + n % 2 * GATES
            for s in T.unroll(GATES):
                for c in T.vectorized(NV):
                    raw_g[s * NV + c] = g[t0 + T.min(first + s, rows - 1), hv, ch + c]
            widen(raw_g, x_g)
            for s in T.unroll(GATES):
                for c in T.unroll(NV):
                    x_g[s * NV + c] = T.Select(
                        first + s < rows, log2_decay(x_g[s * NV + c], use_gate, False, factor, bias[c], None), 0.0
                    )
                    decay[(n * GATES + s) * NV + c] = x_g[s * NV + c]
                    for i in T.unroll(3):  # blocks of 2, 4 and 8 tokens
                        sums[i, c] = T.Select(s % (2 << i) == 0, 0.0, sums[i, c]) + x_g[s * NV + c]
                        least[i] = T.min(least[i], sums[i, c])
        fine = 3
        for i in T.unroll(3):
            level = T.syncthreads_or(T.cast(least[i] < -pivot_range, "int32"))
            fine = fine - T.Select(level != 0, 1, 0)

        # ---- products. A fixed number of them, as wgmma wants it; those past a half's last size are idle.
        part = T.alloc_fragment((2 * HALF, HALF), f32)
        T.clear(c0)
        T.clear(c1)
        for half in T.unroll(2, **ROLLED):
            for step in T.unroll(7, **ROLLED):
                level = fine - 1 + step  # below fine: the inside of the blocks of 2^fine tokens
                size = (1 << T.max(level, fine)) - 1
                if level <= 4 + half:
                    for c in T.unroll(NV):
                        run[c] = T.if_then_else(T.And(level == 5, sub > 0), total_s[2, ch + c], 0.0)
                    for n in T.unroll(SUB // ROWS, **ROLLED):
                        load_rows(x_in, norm_s, scale, half, warp, 0, n * ROWS, ch, xq)
                        load_rows(x_in, norm_s, scale, half, warp, 1, n * ROWS, ch, xk)
                        for s in T.unroll(ROWS):
                            r = n * ROWS + s
                            for c in T.unroll(NV):
                                run[c] = T.Select(T.And(r > 0, r & size == 0), 0.0, run[c]) + T.Select(
                                    T.And(level < fine, r & size == 0), 0.0, decay[(half * SUB + r) * NV + c]
                                )
                                x_up[s * NV + c] = xk[s * NV + c] * T.exp2(-run[c])
                                edge[c] = T.Select(
                                    T.Or(T.Or(level < fine, level == 5), ((sub + r) >> level) & 1 == 1),
                                    T.exp2(run[c]),
                                    0.0,
                                )
                                xq[s * NV + c] = xq[s * NV + c] * edge[c]
                                xk[s * NV + c] = xk[s * NV + c] * edge[c]
                        for s in T.unroll(ROWS):
                            for c in T.vectorized(NV):
                                k1_s[sub + n * ROWS + s, ch + c] = T.cast(xq[s * NV + c], bf16)
                            for c in T.vectorized(NV):
                                k1_s[HALF + sub + n * ROWS + s, ch + c] = T.cast(xk[s * NV + c], bf16)
                        if level < fine:
                            for s in T.unroll(ROWS):
                                for c in T.vectorized(NV):
                                    k0_s[sub + n * ROWS + s, ch + c] = T.cast(x_up[s * NV + c], bf16)
                    if level >= fine:  # left blocks, backwards from the border
                        for c in T.unroll(NV):
                            run[c] = T.if_then_else(T.And(level == 5, sub == 0), total_s[1, ch + c], 0.0)
                        for n in T.unroll(SUB // ROWS, **ROLLED):
                            left = T.if_then_else(level == 5, 0, half)
                            load_rows(x_in, norm_s, scale, left, warp, 1, SUB - ROWS - n * ROWS, ch, xk)
                            for s in T.unroll(ROWS):
                                r = SUB - 1 - n * ROWS - s
                                for c in T.unroll(NV):
                                    xk[(ROWS - 1 - s) * NV + c] = xk[(ROWS - 1 - s) * NV + c] * T.Select(
                                        T.Or(level == 5, ((sub + r) >> level) & 1 == 0), T.exp2(run[c]), 0.0
                                    )
                                    run[c] = T.Select(r & size == 0, 0.0, run[c] + decay[(left * SUB + r) * NV + c])
                            for s in T.unroll(ROWS):
                                for c in T.vectorized(NV):
                                    k0_s[sub + SUB - ROWS - n * ROWS + s, ch + c] = T.cast(xk[s * NV + c], bf16)
                T.fence_proxy_async()
                T.sync_threads()
                T.wgmma_gemm(k1_s, k0_s, part, transpose_B=True, clear_accum=True)
                T.wait_wgmma(0)
                T.sync_threads()
                if half == 0:
                    for i, j in T.Parallel(2 * HALF, HALF):
                        c0[i, j] = T.Select(meets(i % HALF, j, level, fine), part[i, j], c0[i, j])
                else:
                    for i, j in T.Parallel(2 * HALF, HALF):
                        c1[i, j] = T.Select(level == 5, part[i, j], c1[i, j])
                    for i, j in T.Parallel(2 * HALF, HALF):
                        c1[i, HALF + j] = T.Select(meets(i % HALF, j, level, fine), part[i, j], c1[i, HALF + j])

        # ---- kg from the last row on, then qg and k exp(G) from the first
        for half in T.unroll(2, **ROLLED):
            for c in T.unroll(NV):
                edge[c] = T.exp2(
                    T.if_then_else(half == 0, total_s[2, ch + c] + total_s[3, ch + c], 0.0)
                    + T.if_then_else(sub == 0, total_s[half * 2 + 1, ch + c], 0.0)
                )
                run[c] = 0.0
            for n in T.unroll(SUB // ROWS, **ROLLED):
                load_rows(x_in, norm_s, scale, half, warp, 1, SUB - ROWS - n * ROWS, ch, xk)
                for s in T.unroll(ROWS):
                    for c in T.unroll(NV):
                        xk[(ROWS - 1 - s) * NV + c] = xk[(ROWS - 1 - s) * NV + c] * T.exp2(run[c]) * edge[c]
                        run[c] = run[c] + decay[(half * SUB + SUB - 1 - n * ROWS - s) * NV + c]
                for s in T.unroll(ROWS):
                    for c in T.vectorized(NV):
                        table[entry, hv, half * HALF + sub + SUB - ROWS - n * ROWS + s, kg + ch + c] = T.cast(
                            xk[s * NV + c], dtype
                        )
            for c in T.unroll(NV):
                edge[c] = T.exp2(
                    T.if_then_else(half == 1, total_s[0, ch + c] + total_s[1, ch + c], 0.0)
                    + T.if_then_else(sub > 0, total_s[half * 2, ch + c], 0.0)
                )
                run[c] = 0.0
            for n in T.unroll(SUB // ROWS, **ROLLED):
                load_rows(x_in, norm_s, scale, half, warp, 0, n * ROWS, ch, xq)
                load_rows(x_in, norm_s, scale, half, warp, 1, n * ROWS, ch, xk)
                for s in T.unroll(ROWS):
                    for c in T.unroll(NV):
                        run[c] = run[c] + decay[(half * SUB + n * ROWS + s) * NV + c]
                        xq[s * NV + c] = xq[s * NV + c] * T.exp2(run[c]) * edge[c]
                        xk[s * NV + c] = xk[s * NV + c] * T.exp2(run[c]) * edge[c]
                for s in T.unroll(ROWS):
                    for c in T.vectorized(NV):
                        table[entry, hv, half * HALF + sub + n * ROWS + s, ch + c] = T.cast(xq[s * NV + c], dtype)
                    for c in T.vectorized(NV):
                        x_in[half, HALF + sub + n * ROWS + s, ch + c] = T.cast(xk[s * NV + c], dtype)

    return bisected_scores
