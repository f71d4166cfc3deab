"""M2 of a chunk of the common kind: no channel decays by more than 80 nats in 16 tokens, and a pivot per half does.

Rows 32 p .. 32 p + 31, the half p, have as pivot P_p the decay up to the middle of the half, rounded to a whole power
of two:  exp(G_i - G_j) = exp(G_i - P_p) exp(P_p - G_j).  Both exponents stay below 80 nats, what bf16 has room for. The
product of a half takes 32 rows of q over 32 rows of k, so that no tensor core works in vain. In bf16, times the
whole power exp(P_p), pivoted operands become qg and k exp(G) without another rounding; in fp16, qg is made from fp32,
and k exp(G) keeps the bits of its pivoted form: 8 of bf16, or 11 where the decays are mild enough for fp16 operands.
"""

from typing import Any

import tilelang.language as T

from kda.golden.constants import SUB_BLOCK as SUB

from ..scores import HALF
from .activation import widen

ROWS = 4
"""Rows of q and k that a thread has in flight."""

BATCH = 8
"""Rows after which the loop's code repeats: unrolled over all 16, three blocks starve for instructions."""


def make_pivoted_scores(K: int, dtype: str, operand: str, use_qk_l2norm: bool) -> Any:
    """Macro for four warps: fills c0 [64, 32] and c1 [64, 64] (of a half of the chunk, 32 rows of q over 32 rows of k,
    times the columns up to the half's end), writes qg and kg, and leaves k exp(G) in the k rows of x_in.

    log2_a [16 K/32] are the log2 decays of the thread's 16 tokens and K/32 channels, which are used up, and sub_total
    [K/32] their sums. x_s, k0_s and k1_s hold elements of `operand`, and x_s is the memory of x_in.
    """
    NV = K // 32
    f32 = "float32"

    @T.macro
    def pivoted_scores(
        log2_a: Any, sub_total: Any, hv: Any, entry: Any, scale: Any, x_s: Any, x_in: Any, norm_s: Any, total_s: Any,
        k0_s: Any, k1_s: Any, c0: Any, c1: Any, table: Any, kg: int,
    ):  # fmt: skip
        warp = T.get_thread_binding() // 32
        ch = T.get_thread_binding() % 32 * NV
        half = warp // 2
        row0 = warp % 2 * SUB  # the sub-block's first row in its half

        # ---- per channel: pivots, and the factors that lead from the sub-block's ends to them and on
        total = T.alloc_local((4, NV), f32)
        before = T.alloc_local((NV,), f32)
        pivot1 = T.alloc_local((NV,), f32)
        pivot = T.alloc_local((NV,), f32)
        log2_g = T.alloc_local((NV,), f32)  # G - P up to the current row, and up to the sub-block's end
        log2_end = T.alloc_local((NV,), f32)
        to_0 = T.alloc_local((NV,), f32)
        to_1 = T.alloc_local((NV,), f32)
        to_last = T.alloc_local((NV,), f32)
        leave = T.alloc_local((2, NV), f32)  # exp(P) in two steps, lest it underflow where exp(G) doesn't
        leave0 = T.alloc_local((NV,), operand)
        leave1 = T.alloc_local((NV,), operand)
        for i in T.unroll(4):
            for c in T.vectorized(NV):
                total[i, c] = total_s[i, ch + c]
        for c in T.unroll(NV):
            before[c] = (
                T.if_then_else(warp > 0, total[0, c], 0.0)
                + T.if_then_else(warp > 1, total[1, c], 0.0)
                + T.if_then_else(warp > 2, total[2, c], 0.0)
            )
            to_last[c] = T.exp2(
                T.if_then_else(warp < 1, total[1, c], 0.0)
                + T.if_then_else(warp < 2, total[2, c], 0.0)
                + T.if_then_else(warp < 3, total[3, c], 0.0)
            )
            pivot1[c] = T.nearbyint(total[0, c] + total[1, c] + total[2, c])
            pivot[c] = T.if_then_else(warp < 2, T.nearbyint(total[0, c]), pivot1[c])
            log2_g[c] = before[c] - pivot[c]
            log2_end[c] = log2_g[c] + sub_total[c]
            to_0[c] = T.exp2(-log2_end[c])
            to_1[c] = T.exp2(pivot1[c] - pivot[c] - log2_end[c])
            leave[0, c] = T.exp2(pivot[c] - T.nearbyint(before[c]))
            leave[1, c] = T.exp2(T.nearbyint(before[c]))
        for c in T.vectorized(NV):
            leave0[c] = T.cast(leave[0, c], operand)
        for c in T.vectorized(NV):
            leave1[c] = T.cast(leave[1, c], operand)

        # ---- operands, over the rows that they come from
        raw_q = T.alloc_local((ROWS * NV,), dtype)
        raw_k = T.alloc_local((ROWS * NV,), dtype)
        xq = T.alloc_local((ROWS * NV,), f32)
        xk = T.alloc_local((ROWS * NV,), f32)
        q_norm = T.alloc_local((ROWS,), f32)
        k_norm = T.alloc_local((ROWS,), f32)
        k_pivoted = T.alloc_local((NV,), f32)
        k_left = T.alloc_local((ROWS, NV), f32)  # k, decayed up to the sub-block's end
        row_b = T.alloc_local((NV,), operand)
        for batch in T.unroll(SUB // BATCH, unroll_factor=1):
            for n in T.unroll(BATCH // ROWS):
                for r in T.unroll(ROWS):
                    for c in T.vectorized(NV):
                        raw_q[r * NV + c] = x_in[half, row0 + batch * BATCH + n * ROWS + r, ch + c]
                    for c in T.vectorized(NV):
                        raw_k[r * NV + c] = x_in[half, HALF + row0 + batch * BATCH + n * ROWS + r, ch + c]
                if use_qk_l2norm:
                    for r in T.vectorized(ROWS):
                        q_norm[r] = norm_s[warp, 0, batch * BATCH + n * ROWS + r]
                    for r in T.vectorized(ROWS):
                        k_norm[r] = norm_s[warp, 1, batch * BATCH + n * ROWS + r]
                widen(raw_q, xq)
                widen(raw_k, xk)
                for r in T.unroll(ROWS):
                    row = batch * BATCH + n * ROWS + r
                    for c in T.unroll(NV):
                        log2_g[c] = log2_g[c] + log2_a[(n * ROWS + r) * NV + c]
                        xq[r * NV + c] = xq[r * NV + c] * (q_norm[r] if use_qk_l2norm else scale) * T.exp2(log2_g[c])
                        if use_qk_l2norm:
                            xk[r * NV + c] = xk[r * NV + c] * k_norm[r]
                        k_left[r, c] = xk[r * NV + c] * T.exp2(log2_end[c] - log2_g[c])
                        k_pivoted[c] = xk[r * NV + c] * T.exp2(log2_g[c])
                    for c in T.vectorized(NV):
                        row_b[c] = T.cast(k_pivoted[c], operand)
                    for c in T.vectorized(NV):
                        x_s[half, HALF + row0 + row, ch + c] = row_b[c]
                    for c in T.vectorized(NV):
                        row_b[c] = T.cast(xq[r * NV + c], operand)
                    for c in T.vectorized(NV):
                        x_s[half, row0 + row, ch + c] = row_b[c]
                    if dtype == operand == "bfloat16":
                        for c in T.vectorized(NV):
                            table[entry, hv, warp * SUB + row, ch + c] = row_b[c] * leave0[c] * leave1[c]
                    else:
                        for c in T.vectorized(NV):
                            table[entry, hv, warp * SUB + row, ch + c] = T.cast(
                                xq[r * NV + c] * leave[0, c] * leave[1, c], dtype
                            )
                    for c in T.vectorized(NV):
                        table[entry, hv, warp * SUB + row, kg + ch + c] = T.cast(k_left[r, c] * to_last[c], dtype)
                    for c in T.vectorized(NV):
                        k1_s[warp * SUB + row, ch + c] = T.cast(k_left[r, c] * to_1[c], operand)
                if warp < 2:
                    for r in T.unroll(ROWS):
                        for c in T.vectorized(NV):
                            k0_s[warp * SUB + batch * BATCH + n * ROWS + r, ch + c] = T.cast(
                                k_left[r, c] * to_0[c], operand
                            )
            for i in T.unroll((SUB - BATCH) * NV):  # registers have no run-time index: the next batch moves up
                log2_a[i] = log2_a[i + BATCH * NV]
        T.fence_proxy_async()
        T.sync_threads()

        T.wgmma_gemm(x_s[0, :, :], k0_s, c0, transpose_B=True, clear_accum=True)
        T.wgmma_gemm(x_s[1, :, :], k1_s, c1, transpose_B=True, clear_accum=True)
        T.wait_wgmma(0)
        T.sync_threads()  # from here on the memory of k0_s and k1_s may be another's

        # ---- k exp(G) in place of its pivoted form
        rows_b = T.alloc_local((BATCH * NV,), operand)
        for batch in T.unroll(SUB // BATCH, unroll_factor=1):
            for r in T.unroll(BATCH):
                for c in T.vectorized(NV):
                    rows_b[r * NV + c] = x_s[half, HALF + row0 + batch * BATCH + r, ch + c]
            for r in T.unroll(BATCH):
                for c in T.vectorized(NV):
                    x_in[half, HALF + row0 + batch * BATCH + r, ch + c] = T.cast(
                        rows_b[r * NV + c] * leave0[c] * leave1[c], dtype
                    )

    return pivoted_scores
