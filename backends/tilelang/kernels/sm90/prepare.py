"""M1-M3 of every chunk on Hopper GPUs: the thread-level twin of the tile-level prepare.py, with its formulas, tensors
and interface.

One block of four warps makes one (entry, value head). Warp b owns the tokens 16 b .. 16 b + 15, the sub-block b, and a
lane K/32 adjacent channels of it, so that sums along time stay in registers and only four totals a channel travel.

    gates first, then q, k, v by TMA -> decays and norms -> Aqk and Akk (scores_pivoted, or scores_bisected for decays
    that are beyond its pivots) -> Ainv (inverse) -> w, in place of q's operand, and u, in place of v

Ainv diag(beta) is a sum of two matrices of the dtype: where keys are alike, what one of them loses is the same for
every token, and adds up in the state. In fp16, the scores' operands are fp16 too where decays are mild.

Shared memory: 75 KiB, so that three blocks fit a multiprocessor. Automatic barriers are off (they would be five times
as many); every barrier stands here or in a macro, and only {k0_s, k1_s} and {aqk_s, below_s, akk_s, inverse_s}, which
the barrier after the products parts, may have memory in common. A prefetch into L2 of the next block's gates takes away
most of the wait at a block's start (4 % of the time); one of q, k and v too costs more than it brings.
"""

from typing import Any

import tilelang.language as T
from tilelang import PassConfigKey

from kda.golden.constants import CHUNK_SIZE as C
from kda.golden.constants import L2_NORM_EPS, L2_NORM_SHRINK
from kda.golden.constants import SUB_BLOCK as SUB

from ...chunk_table import columns
from ..plan import chunk
from ..prefetch import LINE, PRELUDE, PROCESSORS, itemsize
from ..rows import LARGEST
from ..scores import HALF
from .activation import LOG2E, gate_bias, gate_factor, log2_decay, sigmoid, widen
from .inverse import inverse_times_beta, invert_diagonal_blocks
from .scores_bisected import make_bisected_scores
from .scores_pivoted import make_pivoted_scores

PIVOT_RANGE = 80.0 * LOG2E
"""log2 of what 16 tokens may decay by. A gate in [-5, 0) can't exceed it."""

F16_MAX = 65504.0

MILD = 3.0
"""log2 of what 16 tokens may decay by for operands of fp16, which has fewer exponents than bf16 and more bits."""

RESIDENT = 3 * PROCESSORS
"""Blocks that an H100 or H200 runs at a time: so far ahead lies the block that will follow on this multiprocessor."""

_PASS_CONFIGS = {
    PassConfigKey.TL_ENABLE_FAST_MATH: True,
    PassConfigKey.TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE: True,
    PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,  # rows are clamped by hand
    PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    PassConfigKey.TL_DISABLE_BUFFER_INIT_CHECK: True,  # it takes a select's unused arm for a read
}


def prepare(
    *,
    H: int,
    HV: int,
    K: int,
    V: int,
    dtype: str,
    g_dtype: str,
    beta_dtype: str,
    varlen: bool = False,
    cu_dtype: str = "int32",
    use_qk_l2norm: bool = False,
    use_gate: bool = False,
    bounded_gate: bool = False,
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    with_ainv: bool = False,
) -> Any:
    """Kernel as prepare.prepare describes it, for bf16 and fp16 and K and V of 64 or 128."""
    f32, bf16, f16 = "float32", "bfloat16", "float16"
    NV = K // 32  # channels of a thread
    at = columns(K, V, with_ainv=with_ainv)
    B, L, entries, N1 = T.dynamic("B, L, entries, N1")
    a_log_t = T.Tensor((HV,), f32) if use_gate else None
    dt_bias_t = T.Tensor((HV * K,), f32) if use_gate else None
    lower_bound_t = T.float32 if bounded_gate else None
    cu_seqlens_t = T.Tensor((N1,), cu_dtype) if varlen else None
    owner_t = T.Tensor((entries,), "int32") if varlen else None
    seq_len_t = None if varlen else T.int32
    line = LINE // itemsize(g_dtype)  # elements of g in a cache line
    pivoted_scores = make_pivoted_scores(K, dtype, bf16, use_qk_l2norm)
    mild_scores = make_pivoted_scores(K, dtype, f16, use_qk_l2norm) if dtype == f16 else None
    bisected_scores = make_bisected_scores(K, dtype, g_dtype, use_gate, use_qk_l2norm, PIVOT_RANGE)

    @T.prim_func
    def kda_prepare(
        q: T.Tensor((B, L, H, K), dtype),
        k: T.Tensor((B, L, H, K), dtype),
        v: T.Tensor((B, L, HV, V), dtype),
        g: T.Tensor((B, L, HV, K), g_dtype),
        beta: T.Tensor((B, L, HV), beta_dtype),
        A_log: a_log_t,
        dt_bias: dt_bias_t,
        lower_bound: lower_bound_t,
        scale: T.float32,
        cu_seqlens: cu_seqlens_t,
        owner: owner_t,
        seq_len: seq_len_t,
        table: T.Tensor((entries, HV, C, at.width), dtype),
        decay: T.Tensor((entries, HV, K), f32),
    ):
        T.annotate_pass_configs(_PASS_CONFIGS)
        q = T.reshape(q, (B * L, H, K))
        k = T.reshape(k, (B * L, H, K))
        v = T.reshape(v, (B * L, HV, V))
        g = T.reshape(g, (B * L, HV, K))
        beta = T.reshape(beta, (B * L, HV))
        with T.Kernel(entries * HV, threads=128, prelude=PRELUDE) as block:
            T.annotate_min_blocks_per_sm(3)
            thread = T.get_thread_binding()
            warp = thread // 32
            lane = thread % 32
            half = warp // 2
            row0 = warp % 2 * SUB  # the sub-block's first row in its half
            ch = lane * NV

            x_s = T.alloc_shared((2, C, K), bf16)  # of each half, 32 rows of q over 32 rows of k
            x_in = T.view(x_s, dtype=dtype)  # ... as they come in; later k exp(G), and w over q
            k0_s = T.alloc_shared((HALF, K), bf16)  # k exp(P_0 - G) of the first half
            k1_s = T.alloc_shared((C, K), bf16)  # k exp(P_1 - G)
            v_s = T.alloc_shared((C, V), dtype)  # v, and later u
            aqk_s = T.alloc_shared((C, C), dtype)
            below_s = T.alloc_shared((4, SUB, SUB + 4), f32)  # Akk's diagonal blocks transposed, padded for the banks
            akk_s = T.alloc_shared((4, C, SUB), f16)  # Akk by block columns
            inverse_s = T.alloc_shared((4, SUB, SUB), f16)
            # Static, so that they share their memory with nothing.
            total_s = T.alloc_shared((4, K), f32, scope="shared")
            norm_s = T.alloc_shared((4, 2, SUB), f32, scope="shared")
            beta_s = T.alloc_shared((C,), f32, scope="shared")
            qk_ready = T.alloc_barrier(1)
            v_ready = T.alloc_barrier(1)

            hv = T.alloc_var("int32")
            entry = T.alloc_var("int32")
            hv = block % HV
            entry = block // HV
            t0, rows = chunk(entry, cu_seqlens, owner, seq_len, varlen)
            if rows <= 0:
                T.thread_return()

            # ---- loads: the gates first, everything waits for them
            raw_g = T.alloc_local((SUB * NV,), g_dtype)
            token = T.alloc_var("int32")
            if warp * SUB + SUB <= rows:
                for r in T.unroll(SUB):
                    for c in T.vectorized(NV):
                        raw_g[r * NV + c] = g[t0 + warp * SUB + r, hv, ch + c]
            else:
                for r in T.unroll(SUB):
                    token = t0 + T.min(warp * SUB + r, rows - 1)
                    for c in T.vectorized(NV):
                        raw_g[r * NV + c] = g[token, hv, ch + c]
            for p in (0, 1):
                for c in (0, 64)[: K // 64]:
                    T.tma_copy(
                        k[t0 + p * HALF : t0 + p * HALF + HALF, hv // (HV // H), c : c + 64],
                        x_in[p, HALF:C, c : c + 64],
                        barrier=qk_ready,
                    )
                    T.tma_copy(
                        q[t0 + p * HALF : t0 + p * HALF + HALF, hv // (HV // H), c : c + 64],
                        x_in[p, 0:HALF, c : c + 64],
                        barrier=qk_ready,
                    )
            T.tma_copy(v[t0 : t0 + C, hv, 0:V], v_s, barrier=v_ready)
            if thread == 0:
                T.barrier_arrive(qk_ready)
                T.barrier_arrive(v_ready)
            b = T.alloc_var(f32)
            if thread < C:
                token = t0 + T.min(thread, rows - 1)
                b = T.cast(beta[token, hv], f32)
                if use_beta_sigmoid:
                    b = (2.0 if allow_neg_eigval else 1.0) * sigmoid(b)
                beta_s[thread] = T.if_then_else(thread < rows, b, 0.0)

            # ---- M1: activation
            log2_a = T.alloc_local((SUB * NV,), f32)
            bias = T.alloc_local((NV,), f32)
            factor = T.alloc_var(f32)
            factor = gate_factor(A_log, hv, bounded_gate) if use_gate else 1.0
            for c in T.vectorized(NV):
                bias[c] = dt_bias[hv * K + ch + c] if use_gate else 0.0
            for c in T.unroll(NV):
                bias[c] = gate_bias(factor, bias[c], bounded_gate)
            widen(raw_g, log2_a)
            for i in T.unroll(SUB * NV):
                log2_a[i] = log2_decay(log2_a[i], use_gate, bounded_gate, factor, bias[i % NV], lower_bound)
            T.mbarrier_wait_parity(qk_ready, 0)
            if rows < C:  # a tail: whatever lies behind it, other sequences or NaN, leaves no trace
                T.mbarrier_wait_parity(v_ready, 0)
                for r in T.unroll(SUB):
                    if warp * SUB + r >= rows:
                        for c in T.unroll(NV):
                            log2_a[r * NV + c] = 0.0
                        for c in T.vectorized(NV):
                            x_s[half, row0 + r, ch + c] = T.cast(0.0, bf16)
                        for c in T.vectorized(NV):
                            x_s[half, HALF + row0 + r, ch + c] = T.cast(0.0, bf16)
                        for c in T.vectorized(V // 32):
                            v_s[warp * SUB + r, lane * (V // 32) + c] = T.cast(0.0, dtype)
                T.sync_warp()
            sub_total = T.alloc_local((NV,), f32)
            for c in T.unroll(NV):
                sub_total[c] = 0.0
            for i in T.unroll(SUB * NV):
                sub_total[i % NV] = sub_total[i % NV] + log2_a[i]
            for c in T.vectorized(NV):
                total_s[warp, ch + c] = sub_total[c]
            if use_qk_l2norm:  # a lane adds up one row of its warp's sub-block: q's, then k's
                raw_row = T.alloc_local((8,), dtype)
                row = T.alloc_local((8,), f32)
                square = T.alloc_var(f32)
                square = 0.0
                for j in T.unroll(K // 8):
                    for i in T.vectorized(8):
                        raw_row[i] = x_in[half, lane // SUB * HALF + row0 + lane % SUB, j * 8 + i]
                    widen(raw_row, row)
                    for i in T.unroll(8):
                        square = square + row[i] * row[i]
                shrink = T.alloc_var(f32)
                shrink = 1.0
                if square > LARGEST:  # rare: the sum once more, of a row that fp32 can square
                    raw_large = T.alloc_local((8,), dtype)
                    large = T.alloc_local((8,), f32)
                    shrink = L2_NORM_SHRINK
                    square = -L2_NORM_EPS  # which is added below
                    for j in T.unroll(K // 8, unroll_factor=1):
                        for i in T.vectorized(8):
                            raw_large[i] = x_in[half, lane // SUB * HALF + row0 + lane % SUB, j * 8 + i]
                        widen(raw_large, large)
                        for i in T.unroll(8):
                            square = square + (large[i] * shrink) * (large[i] * shrink)
                norm_s[warp, lane // SUB, lane % SUB] = (
                    shrink * T.rsqrt(square + L2_NORM_EPS) * T.if_then_else(lane < SUB, scale, 1.0)
                )
            strong = T.alloc_var("int32")
            rough = T.alloc_var("int32")
            strong = 0
            rough = 0
            if dtype == f16:
                rough = T.if_then_else(scale * (1.0 if use_qk_l2norm else F16_MAX) * 2.0**MILD < F16_MAX, 0, 1)
                for c in T.unroll(NV):
                    rough = T.if_then_else(sub_total[c] < -MILD, 1, rough)
                rough = T.syncthreads_or(rough)
            if not bounded_gate:
                for c in T.unroll(NV):
                    strong = T.if_then_else(sub_total[c] < -PIVOT_RANGE, 1, strong)
                strong = T.syncthreads_or(strong)
            elif dtype == bf16:
                T.sync_threads()
            if warp == 3:
                last = T.alloc_local((NV,), f32)
                for c in T.unroll(NV):
                    last[c] = T.exp2(total_s[0, ch + c] + total_s[1, ch + c] + total_s[2, ch + c] + sub_total[c])
                for c in T.vectorized(NV):
                    decay[entry, hv, ch + c] = last[c]

            # ---- M2: scores. c0 and c1: of a half 32 rows of Aqk over 32 of Akk without beta, up to its last column
            c0 = T.alloc_fragment((C, HALF), f32)
            c1 = T.alloc_fragment((C, C), f32)
            if not bounded_gate and strong != 0:
                bisected_scores(
                    g, t0, rows, hv, entry, dt_bias, factor, scale,
                    x_in, norm_s, total_s, k0_s, k1_s, c0, c1, table, at.kg,
                )  # fmt: skip
            elif dtype == f16 and rough == 0:
                k0_h = T.view(k0_s, dtype=f16)
                k1_h = T.view(k1_s, dtype=f16)
                mild_scores(
                    log2_a, sub_total, hv, entry, scale, x_in, x_in, norm_s, total_s, k0_h, k1_h, c0, c1, table, at.kg
                )
            else:
                pivoted_scores(
                    log2_a, sub_total, hv, entry, scale, x_s, x_in, norm_s, total_s, k0_s, k1_s, c0, c1, table, at.kg
                )
            # Warps 0 and 1 hold Aqk, warps 2 and 3 Akk. The entries above the diagonal are arbitrary, even infinite.
            for i, j in T.Parallel(HALF, HALF):
                c0[i, j] = T.if_then_else(j <= i, c0[i, j], 0.0)
            for i, j in T.Parallel(HALF, C):
                c1[i, j] = T.if_then_else(j <= i + HALF, c1[i, j], 0.0)
            for i, j in T.Parallel(HALF, HALF):
                aqk_s[i, j] = T.cast(c0[i, j], dtype)
            for i, j in T.Parallel(HALF, HALF):
                aqk_s[i, j + HALF] = T.cast(0.0, dtype)
            for i, j in T.Parallel(HALF, C):
                aqk_s[i + HALF, j] = T.cast(c1[i, j], dtype)
            for p, c in ((0, c0), (1, c1)):
                for i, j in T.Parallel(HALF, SUB):
                    below_s[2 * p + i // SUB, j, i % SUB] = T.if_then_else(
                        j < i % SUB, c[HALF + i, p * HALF + SUB + j] * beta_s[p * HALF + i], 0.0
                    )
                for i, j in T.Parallel(HALF, SUB):
                    if i < SUB:  # over the upper rows' last columns, which the same thread has just put there
                        below_s[2 * p, j, i] = T.if_then_else(
                            j < i, c[HALF + i, p * HALF + j] * beta_s[p * HALF + i], 0.0
                        )
            for i, j in T.Parallel(HALF, HALF):
                akk_s[j // SUB, i, j % SUB] = T.cast(c0[HALF + i, j] * beta_s[i], f16)
            for i, j in T.Parallel(HALF, C):
                akk_s[j // SUB, HALF + i, j % SUB] = T.cast(c1[HALF + i, j] * beta_s[HALF + i], f16)
            T.fence_proxy_async()
            T.sync_threads()
            # The gates that the next block here will wait for.
            for i in T.unroll(T.ceildiv(C * K, 128 * line)):
                token = t0 + ((block + RESIDENT) // HV - entry) * C + (i * 128 + thread) * line // K
                if T.And(token < B * L, (i * 128 + thread) * line < C * K):
                    T.call_extern(
                        "handle",
                        "prefetch_line",
                        T.address_of(g[token, (block + RESIDENT) % HV, (i * 128 + thread) * line % K]),
                    )

            # ---- M2: the inverse
            invert_diagonal_blocks(below_s, inverse_s)
            T.fence_proxy_async()
            T.sync_threads()
            step_0 = T.alloc_fragment((C, HALF), dtype)
            step_1 = T.alloc_fragment((C, HALF), dtype)
            rest_0 = T.alloc_fragment((C, HALF), dtype)
            rest_1 = T.alloc_fragment((C, HALF), dtype)
            ainv_0 = T.alloc_fragment((C, HALF), dtype) if with_ainv else None
            ainv_1 = T.alloc_fragment((C, HALF), dtype) if with_ainv else None
            inverse_times_beta(
                inverse_s, akk_s, beta_s, (step_0, step_1), (rest_0, rest_1), (ainv_0, ainv_1) if with_ainv else None
            )

            # ---- M3: wy. w over the rows of q, u over v
            w_f = T.alloc_fragment((C, K), f32)
            T.wgmma_gemm(step_0, x_in[0, HALF:C, :], w_f, clear_accum=True)
            T.wgmma_gemm(step_1, x_in[1, HALF:C, :], w_f)
            T.wgmma_gemm(rest_0, x_in[0, HALF:C, :], w_f)
            T.wgmma_gemm(rest_1, x_in[1, HALF:C, :], w_f)
            T.wait_wgmma(0)
            for i, j in T.Parallel(C, K):
                x_in[i // HALF, i % HALF, j] = T.cast(w_f[i, j], dtype)
            u_f = T.alloc_fragment((C, V), f32)
            u_h = T.alloc_fragment((C, V), dtype)
            T.mbarrier_wait_parity(v_ready, 0)
            T.wgmma_gemm(step_0, v_s[0:HALF, :], u_f, clear_accum=True)
            T.wgmma_gemm(step_1, v_s[HALF:C, :], u_f)
            T.wgmma_gemm(rest_0, v_s[0:HALF, :], u_f)
            T.wgmma_gemm(rest_1, v_s[HALF:C, :], u_f)
            T.wait_wgmma(0)
            T.fence_proxy_async()
            T.sync_threads()
            T.tma_copy(aqk_s, table[entry, hv, 0:C, at.aqk : at.aqk + C])
            for p in (0, 1):
                for c in (0, 64)[: K // 64]:
                    T.tma_copy(
                        x_in[p, 0:HALF, c : c + 64],
                        table[entry, hv, p * HALF : p * HALF + HALF, at.w + c : at.w + c + 64],
                    )
            for i, j in T.Parallel(C, V):
                u_h[i, j] = T.cast(u_f[i, j], dtype)
            T.copy(u_h, v_s)
            if with_ainv:  # over what was w's operand
                for p, ainv in ((0, ainv_0), (1, ainv_1)):
                    for i, j in T.Parallel(C, HALF):
                        x_in[i // HALF, HALF + i % HALF, p * HALF + j] = ainv[i, j]
            T.fence_proxy_async()
            T.sync_threads()
            T.tma_copy(v_s, table[entry, hv, 0:C, at.u : at.u + V])
            if with_ainv:
                for p in (0, 1):
                    T.tma_copy(
                        x_in[p, HALF:C, 0:C], table[entry, hv, p * HALF : p * HALF + HALF, at.ainv : at.ainv + C]
                    )
            T.tma_store_wait()

    return kda_prepare
