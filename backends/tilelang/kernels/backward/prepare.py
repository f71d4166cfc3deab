"""dM3 to dM1 of every chunk, in parallel over (entry, value head): the counterpart of the forward's prepare.

    products of tiles and sums over V (wy.py) -> q, k and the log decays (scores.py) -> the raw inputs (activation.py)

in: q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K], beta [B, T, HV], A_log [HV] and dt_bias [HV * K] fp32 as the
    forward has them, d_o [B, T, HV, V]; h and dh [entries, HV, V, K], the state that enters a chunk and the gradient of
    the one that leaves it, v_new and ndb [entries, HV, 64, V] (../chunk_delta_h.py, carry.py)
out: dq and dk [B, T, HV, K], of which the sum over a head's value heads is the caller's, dv, dg and dbeta, all of the
    raw inputs; dgate [entries, HV, 2, K] fp32, the sums over the chunk of dg and of A_log's gradient, 0 for an unused
    entry; it exists with the gate. Rows outside of all sequences are left as they are.

One block of 4 K threads makes one (entry, value head), with all of a multiprocessor's registers and shared memory, so
that many of its phases wait for nothing but issue slots: tiles that are read by rows lie in rows, where a thread's
addresses differ by constants. Automatic barriers are off (they would stand in the unrolled loops): each phase ends with
one of these here, behind which other tiles may have its memory. Beside them, only reduce_sum needs any, and a row lies
in one warp.
"""

from typing import Any

import tilelang.language as T
from tilelang import PassConfigKey
from tilelang.layout import Layout

from kda.golden.constants import CHUNK_SIZE as C

from ..activation import rate
from ..plan import chunk
from ..prefetch import PRELUDE, PROCESSORS, prefetch_rows, prefetch_tile
from .activation import decays, load_gates, row_factors, store_rows, through_gate, through_norm, through_step
from .scores import (
    BLOCKS,
    HALF,
    ROWS,
    add_passing,
    gather_columns,
    gather_rows,
    level_operands,
    place_scores,
)  # fmt: skip
from .wy import sum_over_states, through_v

_PASS_CONFIGS = {
    PassConfigKey.TL_ENABLE_FAST_MATH: True,
    PassConfigKey.TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE: True,
    PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
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
) -> Any:
    """Kernel (q, k, v, g, beta, [A_log, dt_bias], [lower_bound], scale, [cu_seqlens, owner] | seq_len,
    d_o, h, dh, v_new, ndb, dq, dk, dv, dg, dbeta, [dgate]).

    The arguments of the gate exist as in the forward's prepare.py; cu_seqlens [N + 1] and owner [entries] in the varlen
    form, else seq_len (an int). scale is a float.
    """
    f32 = "float32"
    B, L, entries, N1 = T.dynamic("B, L, entries, N1")
    a_log_t = T.Tensor((HV,), f32) if use_gate else None
    dt_bias_t = T.Tensor((HV * K,), f32) if use_gate else None
    lower_bound_t = T.float32 if bounded_gate else None
    cu_seqlens_t = T.Tensor((N1,), cu_dtype) if varlen else None
    owner_t = T.Tensor((entries,), "int32") if varlen else None
    seq_len_t = None if varlen else T.int32
    dgate_t = T.Tensor((entries, HV, 2, K), f32) if use_gate else None

    @T.prim_func
    def kda_backward_prepare(
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
        d_o: T.Tensor((B, L, HV, V), dtype),
        h: T.Tensor((entries, HV, V, K), dtype),
        dh: T.Tensor((entries, HV, V, K), dtype),
        v_new: T.Tensor((entries, HV, C, V), dtype),
        ndb: T.Tensor((entries, HV, C, V), dtype),
        dq: T.Tensor((B, L, HV, K), dtype),
        dk: T.Tensor((B, L, HV, K), dtype),
        dv: T.Tensor((B, L, HV, V), dtype),
        dg: T.Tensor((B, L, HV, K), g_dtype),
        dbeta: T.Tensor((B, L, HV), beta_dtype),
        dgate: dgate_t,
    ):
        T.annotate_pass_configs(_PASS_CONFIGS)
        q = T.reshape(q, (B * L, H, K))
        k = T.reshape(k, (B * L, H, K))
        v = T.reshape(v, (B * L, HV, V))
        g = T.reshape(g, (B * L, HV, K))
        beta = T.reshape(beta, (B * L, HV))
        d_o = T.reshape(d_o, (B * L, HV, V))
        dq = T.reshape(dq, (B * L, HV, K))
        dk = T.reshape(dk, (B * L, HV, K))
        dv = T.reshape(dv, (B * L, HV, V))
        dg = T.reshape(dg, (B * L, HV, K))
        dbeta = T.reshape(dbeta, (B * L, HV))
        with T.Kernel(entries * HV, threads=4 * K, prelude=PRELUDE) as block:
            hv = block % HV
            hk = hv // (HV // H)
            entry = block // HV
            t0, rows = chunk(entry, cu_seqlens, owner, seq_len, varlen)
            if rows > 0:
                # ---- loads: q over k, and do over -db
                qk_s = T.alloc_shared((2 * C, K), dtype)
                y_s = T.alloc_shared((2 * C, V), dtype)
                v_new_s = T.alloc_shared((C, V), dtype)
                h_s = T.alloc_shared((V, K), dtype)
                dh_s = T.alloc_shared((V, K), dtype)
                v_s = T.alloc_shared((C, V), dtype)
                raw_g = T.alloc_fragment((ROWS, BLOCKS, K), g_dtype)
                bias = T.alloc_fragment((BLOCKS, K), f32)
                row_s = T.alloc_shared((C, 4), f32)  # factors of q and k, beta, and P's diagonal
                log2_block_s = T.alloc_shared((BLOCKS, K), f32)
                # TileLang places tiles as they are first touched: these stay, and are not to part what comes and goes.
                # Nobody else writes what is touched here before the next barrier.
                for i in T.Parallel(C):
                    row_s[i, 3] = 0.0
                for b, c in T.Parallel(BLOCKS, K):
                    log2_block_s[b, c] = 0.0
                qk_ready = T.alloc_barrier(1)
                y_ready = T.alloc_barrier(1)
                h_ready = T.alloc_barrier(1)
                dh_ready = T.alloc_barrier(1)
                T.tma_copy(q[t0 : t0 + C, hk, 0:K], qk_s[0:C, 0:K], barrier=qk_ready)
                T.tma_copy(k[t0 : t0 + C, hk, 0:K], qk_s[C : 2 * C, 0:K], barrier=qk_ready)
                for c in (0, 64)[: V // 64]:
                    T.tma_copy(d_o[t0 : t0 + C, hv, c : c + 64], y_s[0:C, c : c + 64], barrier=y_ready)
                    T.tma_copy(ndb[entry, hv, 0:C, c : c + 64], y_s[C : 2 * C, c : c + 64], barrier=y_ready)
                T.tma_copy(v_new[entry, hv, 0:C, 0:V], v_new_s, barrier=y_ready)
                if T.get_thread_binding() == 0:
                    T.barrier_arrive(qk_ready)
                    T.barrier_arrive(y_ready)
                load_gates(g, t0, rows, hv, raw_g)
                for b, c in T.Parallel(BLOCKS, K):
                    bias[b, c] = dt_bias[hv * K + c] if use_gate else 0.0
                A = rate(A_log, hv, use_gate)

                # ---- M1 once more: eight rows of two channels are a thread's
                a = T.alloc_fragment((ROWS, BLOCKS, K), f32)
                decays(raw_g, rows, bias, A, lower_bound, use_gate, bounded_gate, a, log2_block_s)
                # These come in behind the gates, which are what is waited for first.
                T.tma_copy(h[entry, hv, 0:V, 0:K], h_s, barrier=h_ready)
                T.tma_copy(dh[entry, hv, 0:V, 0:K], dh_s, barrier=dh_ready)
                T.tma_copy(v[t0 : t0 + C, hv, 0:V], v_s, barrier=dh_ready)
                if T.get_thread_binding() == 0:
                    T.barrier_arrive(h_ready)
                    T.barrier_arrive(dh_ready)
                T.mbarrier_wait_parity(qk_ready, 0)
                T.mbarrier_wait_parity(y_ready, 0)
                if rows < C:  # what stands behind the sequence's end may even be NaN
                    for i, c in T.Parallel(2 * C, K):
                        if i % C >= rows:
                            qk_s[i, c] = T.cast(0, dtype)
                    for i, c in T.Parallel(C, V):
                        if i >= rows:
                            y_s[i, c] = T.cast(0, dtype)
                    T.fence_proxy_async()
                    T.sync_threads()
                row_factors(qk_s, beta, t0, rows, hv, scale, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, row_s)

                # ---- dM3
                P = T.alloc_fragment((2 * C, C), f32)
                R = T.alloc_fragment((2 * C, K), f32)
                Z = T.alloc_fragment((C, K), f32)
                part = T.alloc_fragment((BLOCKS, K), f32)
                v_dot_ndb = T.alloc_fragment((C,), f32)
                T.gemm(y_s, v_new_s, P, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                T.mbarrier_wait_parity(h_ready, 0)
                T.gemm(y_s, h_s, R, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                T.mbarrier_wait_parity(dh_ready, 0)
                T.gemm(v_new_s, dh_s, Z, clear_accum=True)
                sum_over_states(h_s, dh_s, part)
                T.sync_threads()  # row_s
                through_v(v_s, y_s, row_s, t0, rows, hv, v_dot_ndb, dv)
                T.sync_threads()

                ahead = block + PROCESSORS
                if ahead < entries * HV:
                    token = t0 + (ahead // HV - entry) * C
                    prefetch_rows(g, token, ahead % HV, 0)
                    prefetch_rows(d_o, token, ahead % HV, 0)
                    prefetch_rows(v, token, ahead % HV, 1)
                    prefetch_rows(q, token, ahead % HV // (HV // H), 2)
                    prefetch_rows(k, token, ahead % HV // (HV // H), 3)
                    prefetch_tile(h, ahead // HV, ahead % HV, 0)
                    prefetch_tile(dh, ahead // HV, ahead % HV, 32)
                    prefetch_tile(v_new, ahead // HV, ahead % HV, 64)
                    prefetch_tile(ndb, ahead // HV, ahead % HV, 96)

                # ---- dM2: R and Z, and what the levels read
                rows_s = T.alloc_shared((2 * C, K + 8), f32)  # R, later dq over dk⁺
                z_s = T.alloc_shared((C, K), dtype)
                within_s = T.alloc_shared((BLOCKS, ROWS, ROWS, 2), f32)
                part_s = T.alloc_shared((BLOCKS, K), f32)
                v_dot_ndb_s = T.alloc_shared((C,), f32)
                levels_s = T.alloc_shared((2 * C, C), dtype)
                right_s = T.alloc_shared((2 * C, K), dtype)
                left_s = T.alloc_shared((C, K), dtype)
                level_8_s = T.alloc_shared((C, C), dtype)
                right_8_s = T.alloc_shared((C, K), dtype)
                left_8_s = T.alloc_shared((HALF, K), dtype)
                for i, c in T.Parallel(2 * C, K):
                    rows_s[i, c] = R[i, c]
                T.copy(Z, z_s)
                for b, c in T.Parallel(BLOCKS, K):
                    part_s[b, c] = part[b, c]
                for i in T.Parallel(C):
                    v_dot_ndb_s[i] = v_dot_ndb[i]
                place_scores(P, within_s, levels_s, level_8_s, row_s)
                level_operands(a, log2_block_s, qk_s, row_s, right_s, left_s, right_8_s, left_8_s)
                T.fence_proxy_async()
                T.sync_threads()
                # The products take the operands' places: level 8's first, so that few registers hold them at a time.
                of_rows_8 = T.alloc_fragment((C, K), f32)
                of_columns_8 = T.alloc_fragment((C, K), f32)
                T.gemm(level_8_s[:, 0:HALF], left_8_s, of_rows_8, clear_accum=True)
                T.gemm(level_8_s, right_8_s, of_columns_8, transpose_A=True, clear_accum=True)
                T.sync_threads()
                of_rows_8_s = T.alloc_shared((C, K), dtype)
                of_columns_8_s = T.alloc_shared((HALF, K), dtype)
                T.annotate_layout({tile: _rotated(tile) for tile in (z_s, of_rows_8_s, of_columns_8_s)})
                low_8 = T.alloc_fragment((C, K), dtype)
                T.copy(of_rows_8, low_8)
                for i, c in T.Parallel(C, K):
                    of_rows_8_s[i, c] = low_8[i, c]
                T.copy(of_columns_8, low_8)
                for i, c in T.Parallel(C, K):
                    if i < HALF:
                        of_columns_8_s[i, c] = low_8[i, c]
                of_rows = T.alloc_fragment((2 * C, K), f32)
                of_columns = T.alloc_fragment((C, K), f32)
                T.gemm(levels_s, left_s, of_rows, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                T.gemm(levels_s, right_s, of_columns, transpose_A=True, clear_accum=True)
                T.sync_threads()
                of_rows_s = T.alloc_shared((2 * C, K), dtype)
                of_columns_s = T.alloc_shared((C, K), dtype)
                T.annotate_layout({tile: _rotated(tile) for tile in (of_rows_s, of_columns_s)})
                low = T.alloc_fragment((2 * C, K), dtype)
                T.copy(of_rows, low)
                for i, c in T.Parallel(2 * C, K):
                    of_rows_s[i, c] = low[i, c]
                T.copy(of_columns, low_8)
                for i, c in T.Parallel(C, K):
                    of_columns_s[i, c] = low_8[i, c]
                T.sync_threads()
                flow = T.alloc_fragment((ROWS, BLOCKS, K), f32)
                total = T.alloc_fragment((BLOCKS, K), f32)
                border = T.alloc_fragment((BLOCKS, K), f32)
                cross_32 = T.alloc_fragment((BLOCKS, K), f32)
                cross_16 = T.alloc_fragment((BLOCKS, K), f32)
                gather_rows(
                    a, log2_block_s, qk_s, row_s, within_s, of_rows_s, of_rows_8_s, rows_s, border, cross_32,
                    cross_16,
                )  # fmt: skip
                T.sync_threads()
                passing_s = T.alloc_shared((6, BLOCKS, K), f32)
                columns_s = T.alloc_shared((C, K), f32)  # dk⁻
                for b, c in T.Parallel(BLOCKS, K):
                    passing_s[0, b, c] = border[b, c]
                    passing_s[1, b, c] = cross_32[b, c]
                    passing_s[2, b, c] = cross_16[b, c]
                gather_columns(
                    a, log2_block_s, qk_s, row_s, within_s, of_columns_s, of_columns_8_s, z_s, rows_s, columns_s,
                    flow, total, border, cross_32, cross_16,
                )  # fmt: skip
                for b, c in T.Parallel(BLOCKS, K):
                    passing_s[3, b, c] = border[b, c]
                    passing_s[4, b, c] = cross_32[b, c]
                    passing_s[5, b, c] = cross_16[b, c]
                T.sync_threads()

                # ---- dM1
                load_gates(g, t0, rows, hv, raw_g)
                add_passing(passing_s, part_s, log2_block_s, total)
                raw_sum = T.alloc_fragment((BLOCKS, K), f32) if use_gate else None
                rate_sum = T.alloc_fragment((BLOCKS, K), f32) if use_gate else None
                through_gate(
                    raw_g, t0, rows, hv, bias, A, lower_bound, use_gate, bounded_gate, flow, total, dg, raw_sum,
                    rate_sum,
                )  # fmt: skip
                if use_gate:
                    T.sync_threads()  # passing_s has been read
                    sums_s = T.alloc_shared((2, BLOCKS, K), f32)
                    for b, c in T.Parallel(BLOCKS, K):
                        sums_s[0, b, c] = raw_sum[b, c]
                        sums_s[1, b, c] = rate_sum[b, c]
                    T.sync_threads()
                    for s, c in T.Parallel(2, K):
                        dgate[entry, hv, s, c] = (
                            (sums_s[s, 0, c] + sums_s[s, 1, c]) + (sums_s[s, 2, c] + sums_s[s, 3, c])
                        ) + ((sums_s[s, 4, c] + sums_s[s, 5, c]) + (sums_s[s, 6, c] + sums_s[s, 7, c]))
                d = T.alloc_fragment((C, K), f32)
                for i, c in T.Parallel(C, K):
                    # With q's pair with its own key: across no decay, and never let into the sums that flow across one.
                    d[i, c] = rows_s[i, c] + T.cast(qk_s[C + i, c], f32) * (row_s[i, 1] * row_s[i, 3])
                through_norm(qk_s, row_s, 0, scale, use_qk_l2norm, d)
                store_rows(d, t0, rows, hv, dq)
                for i, c in T.Parallel(C, K):
                    d[i, c] = rows_s[C + i, c]
                through_step(d, qk_s, row_s, v_dot_ndb_s, t0, rows, hv, use_beta_sigmoid, allow_neg_eigval, dbeta)
                for i, c in T.Parallel(C, K):
                    d[i, c] = d[i, c] * row_s[i, 2] + columns_s[i, c]
                through_norm(qk_s, row_s, 1, scale, use_qk_l2norm, d)
                store_rows(d, t0, rows, hv, dk)
            elif use_gate:
                for s, c in T.Parallel(2, K):
                    dgate[entry, hv, s, c] = 0.0

    return kda_backward_prepare


def _rotated(tile: Any) -> Layout:
    """Each row a little further: the product of a matrix instruction is stored by eight rows at a time."""
    rows, columns = tile.shape
    return Layout((rows, columns), lambda i, c: (i, (c + i % 8 * 8) % columns))
