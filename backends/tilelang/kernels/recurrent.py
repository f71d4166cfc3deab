"""fused_recurrent_kda in one kernel: token by token, the state in registers, and states in the slots of a pool.

Per (sequence, value head, tile of V), token after token, with the tile of S [K, tile] fp32, a = exp(g) per channel and
k, q as the norm leaves them:

    r = (a k)ᵀ S      p = (a q)ᵀ S      delta = beta (v - r)      o = scale (p + (q · k) delta)      S <- a S + k deltaᵀ

which is S <- diag(a) S; S <- S + beta k (v - kᵀ S)ᵀ; o = scale qᵀ S with the state read once for both products.

in: q, k [B, T, H, K]   v [B, T, HV, V]   g [B, T, HV, K]   beta [B, T, HV]   A_log [HV], dt_bias [HV * K] fp32
    of the first five, a token's heads lie side by side; tokens and batches may lie anywhere
    initial_state fp32, bf16 or fp16 [N, HV, V, K] ([.., K, V]), or a pool [slots, ...] with indices [N] or [N, S] and
    accepted [N]
out: o [B, T, HV, V], every row: 0 for padding and for sequences that start from a null slot
    states: into initial_state itself, or final_state in its dtype, a row per sequence, or per token with indices [N, S]
    drafts [rows * draft_steps, HV, V, K]: the state after each of a sequence's first draft_steps tokens, from entry
    row * draft_steps on, where row is draft_rows[n], or n

Assumes that no slot is named twice, and bounds in range. Slots outside first_slot .. slots - 1 are null and never
touched, and so is what a count outside 1 .. S or a token past S would name.
"""

from typing import Any

import tilelang.language as T

from kda.golden.constants import L2_NORM_EPS, L2_NORM_SHRINK

from .activation import log2_gate, rate, sigmoid
from .rows import LARGEST
from .state import load_state, store_state

THREADS = 128
ROW_THREADS = 8
"""Threads that share a column of the state in V-first memory: with four channels each they read 128 bytes of it."""


def _slot(index: Any, first: int, slots: Any) -> Any:
    """An index in int32, and -1 for any that names no slot: of 64 bits the lower 32 may be another slot's."""
    return T.cast(T.if_then_else(T.And(index >= first, index < slots), index, T.cast(-1, index.dtype)), "int32")


def state_fragment(block_V: int, K: int, state_v_first: bool) -> Any:
    """Layout of the tile [block_V, K]: neighbours in memory are neighbours in a warp, four to a thread."""
    if state_v_first:
        columns = THREADS // ROW_THREADS  # columns of V at a time
        channels = 4 * ROW_THREADS  # of K at a time
        return T.Fragment(
            (block_V, K),
            forward_thread_fn=lambda i, j: i % columns * ROW_THREADS + j % channels // 4,
            forward_index_fn=lambda i, j: (i // columns * (K // channels) + j // channels) * 4 + j % 4,
        )
    quads = block_V // 4
    channels = THREADS // quads
    return T.Fragment(
        (block_V, K),
        forward_thread_fn=lambda i, j: j % channels * quads + i // 4,
        forward_index_fn=lambda i, j: j // channels * 4 + i % 4,
    )


def fused_recurrent(
    *,
    H: int,
    HV: int,
    K: int,
    V: int,
    dtype: str,
    g_dtype: str,
    beta_dtype: str,
    cu_dtype: str | None = None,
    use_qk_l2norm: bool = False,
    use_gate: bool = False,
    bounded_gate: bool = False,
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    state_dtype: str = "float32",
    has_initial_state: bool = False,
    has_final_state: bool = False,
    inplace: bool = False,
    gaps: bool = False,
    slot_dtype: str | None = None,
    slots_per_token: bool = False,
    first_slot: int = 1,
    accepted_dtype: str | None = None,
    drafts_dtype: str | None = None,
    draft_rows_dtype: str | None = None,
    block_V: int = 64,
) -> Any:
    """Kernel (q, k, v, g, beta, their strides (ten), [A_log, dt_bias], [lower_bound], scale, cu_seqlens | seq_len,
    [initial_state, quads | strides], [indices], [accepted], o, [final_state], [drafts, draft_steps], [draft_rows]).

    Of q, k, v, g and beta, in this order, the strides from batch to batch and from token to token are given.
    A_log and dt_bias exist with `use_gate`, lower_bound (a float) with `bounded_gate` too; cu_seqlens [N + 1] with
    `cu_dtype`, else seq_len (an int); indices with `slot_dtype`, [N, S] if `slots_per_token`; accepted with
    `accepted_dtype`. `inplace` writes to initial_state. Its slots are dense, `quads` times four elements apart and
    aligned to four elements; with `gaps` they need not be, and its four strides stand in place of quads.
    """
    f32 = "float32"
    varlen = cu_dtype is not None
    tiles = V // block_V
    B, L, N1, slots, S, places = T.dynamic("B, L, N1, slots, S, places")
    q_t = T.StridedTensor((B, L, H, K), T.dynamic("q0, q1, q2, q3"), dtype)
    k_t = T.StridedTensor((B, L, H, K), T.dynamic("k0, k1, k2, k3"), dtype)
    v_t = T.StridedTensor((B, L, HV, V), T.dynamic("v0, v1, v2, v3"), dtype)
    g_t = T.StridedTensor((B, L, HV, K), T.dynamic("g0, g1, g2, g3"), g_dtype)
    beta_t = T.StridedTensor((B, L, HV), T.dynamic("b0, b1, b2"), beta_dtype)
    sequences = N1 - 1 if varlen else B
    state = (HV, V, K) if state_v_first else (HV, K, V)
    a_log_t = T.Tensor((HV,), f32) if use_gate else None
    dt_bias_t = T.Tensor((HV * K,), f32) if use_gate else None
    lower_bound_t = T.float32 if bounded_gate else None
    cu_seqlens_t = T.Tensor((N1,), cu_dtype) if varlen else None
    seq_len_t = None if varlen else T.int32
    initial_state_t = None
    if has_initial_state:
        initial_state_t = T.StridedTensor((slots, *state), T.dynamic("s0, s1, s2, s3"), state_dtype)
    quads_t = T.int32 if has_initial_state and not gaps else None
    stride_t = T.int64 if gaps else None
    indices_t = None
    if slot_dtype is not None:
        indices_t = T.Tensor((sequences, S) if slots_per_token else (sequences,), slot_dtype)
    accepted_t = None if accepted_dtype is None else T.Tensor((sequences,), accepted_dtype)
    final_rows = B * L if slots_per_token else sequences
    final_state_t = T.Tensor((final_rows, *state), state_dtype) if has_final_state else None
    drafts_t = None if drafts_dtype is None else T.Tensor((places, *state), drafts_dtype)
    draft_steps_t = None if drafts_dtype is None else T.int32
    draft_rows_t = None if draft_rows_dtype is None else T.Tensor((sequences,), draft_rows_dtype)

    @T.prim_func
    def kda_fused_recurrent(
        q: q_t,
        k: k_t,
        v: v_t,
        g: g_t,
        beta: beta_t,
        q_batch: T.int64,
        q_token: T.int64,
        k_batch: T.int64,
        k_token: T.int64,
        v_batch: T.int64,
        v_token: T.int64,
        g_batch: T.int64,
        g_token: T.int64,
        beta_batch: T.int64,
        beta_token: T.int64,
        A_log: a_log_t,
        dt_bias: dt_bias_t,
        lower_bound: lower_bound_t,
        scale: T.float32,
        cu_seqlens: cu_seqlens_t,
        seq_len: seq_len_t,
        initial_state: initial_state_t,
        quads: quads_t,
        slot_stride: stride_t,
        head_stride: stride_t,
        row_stride: stride_t,
        column_stride: stride_t,
        indices: indices_t,
        accepted: accepted_t,
        o: T.Tensor((B, L, HV, V), dtype),
        final_state: final_state_t,
        drafts: drafts_t,
        draft_steps: draft_steps_t,
        draft_rows: draft_rows_t,
    ):
        q = T.StridedTensor((B, L, H, K), (q_batch, q_token, K, 1), dtype, data=q.data)
        k = T.StridedTensor((B, L, H, K), (k_batch, k_token, K, 1), dtype, data=k.data)
        v = T.StridedTensor((B, L, HV, V), (v_batch, v_token, V, 1), dtype, data=v.data)
        g = T.StridedTensor((B, L, HV, K), (g_batch, g_token, K, 1), g_dtype, data=g.data)
        beta = T.StridedTensor((B, L, HV), (beta_batch, beta_token, 1), beta_dtype, data=beta.data)
        if has_initial_state:
            dense = (4 * quads, state[1] * state[2], state[2], 1) if not gaps else None
            strides = (slot_stride, head_stride, row_stride, column_stride) if gaps else dense
            initial_state = T.StridedTensor((slots, *state), strides, state_dtype, data=initial_state.data)
        # One more sequence than there are in the varlen form: the padding behind and before them.
        with T.Kernel((N1 if varlen else B) * HV * tiles, threads=THREADS) as block:
            column = block % tiles * block_V
            hv = block // tiles % HV
            n = block // tiles // HV
            hk = hv // (HV // H)

            batch = T.alloc_var("int32")
            bos = T.alloc_var("int32")
            length = T.alloc_var("int32")
            start = T.alloc_var("int32")  # slot, -1 for null; a call without slots has rows, and none of them is null
            lead = T.alloc_var("int32")  # padding before the first sequence, for the block that has all of it
            lead = 0
            if varlen:
                batch = 0
                if n == sequences:
                    lead = T.cast(cu_seqlens[0], "int32")
                bos = T.cast(cu_seqlens[n], "int32")
                length = T.if_then_else(n < sequences, T.cast(cu_seqlens[T.min(n + 1, sequences)], "int32"), L) - bos
            else:
                batch = n
                bos = 0
                length = seq_len
            start = n
            if slot_dtype is not None:
                start = -1
            if n < sequences:
                if accepted_dtype is not None:
                    if T.And(accepted[n] >= 1, accepted[n] <= S):
                        start = _slot(indices[n, T.cast(accepted[n], "int32") - 1], first_slot, slots)
                elif slots_per_token:
                    start = _slot(indices[n, 0], first_slot, slots)
                elif slot_dtype is not None:
                    start = _slot(indices[n], first_slot, slots)

            tile = T.alloc_fragment((block_V, K), f32)
            product = T.alloc_fragment((block_V, K), f32)
            read_k = T.alloc_fragment((block_V,), f32)
            read_q = T.alloc_fragment((block_V,), f32)
            delta = T.alloc_fragment((block_V,), f32)
            rows = T.alloc_fragment((4, K), f32)  # one more than is needed, so that they fill the block's threads
            sums = T.alloc_fragment((4,), f32)
            a_s = T.alloc_shared((K,), f32)
            k_s = T.alloc_shared((K,), f32)
            q_s = T.alloc_shared((K,), f32)
            sums_s = T.alloc_shared((4,), f32)
            T.annotate_layout({x: state_fragment(block_V, K, state_v_first) for x in (tile, product)})

            draft_row = T.alloc_var("int32")  # -1 for none
            if drafts_dtype is not None:
                draft_row = -1
                if n < sequences:
                    row_of = draft_rows[n] if draft_rows_dtype is not None else n
                    draft_row = _slot(row_of, 0, places // draft_steps)

            slot = T.alloc_var("int32")
            b = T.alloc_var(f32)
            k_eps = T.alloc_var(f32)
            q_eps = T.alloc_var(f32)
            if T.And(n < sequences, start >= 0):
                if has_initial_state:
                    load_state(initial_state, start, hv, column, state_v_first, tile)
                else:
                    T.clear(tile)
                A = rate(A_log, hv, use_gate)
                for t in T.serial(length):
                    for j in T.Parallel(K):
                        k_s[j] = T.cast(k[batch, bos + t, hk, j], f32)
                        q_s[j] = T.cast(q[batch, bos + t, hk, j], f32)
                        log2_a = log2_gate(
                            T.cast(g[batch, bos + t, hv, j], f32), dt_bias[hv * K + j] if use_gate else 0.0, A,
                            lower_bound, use_gate, bounded_gate,
                        )  # fmt: skip
                        a_s[j] = T.exp2(log2_a)
                    for x, j in T.Parallel(4, K):
                        rows[x, j] = T.if_then_else(x == 1, q_s[j], k_s[j]) * T.if_then_else(x == 0, k_s[j], q_s[j])
                    T.reduce_sum(rows, sums, dim=1)
                    for x in T.Parallel(4):
                        sums_s[x] = sums[x]
                    if use_qk_l2norm:
                        k_eps = L2_NORM_EPS
                        q_eps = L2_NORM_EPS
                        if T.Or(sums_s[0] > LARGEST, sums_s[1] > LARGEST):  # rare: rows that fp32 can square in place
                            k_eps = T.if_then_else(sums_s[0] > LARGEST, 0.0, k_eps)
                            q_eps = T.if_then_else(sums_s[1] > LARGEST, 0.0, q_eps)
                            for j in T.Parallel(K):
                                k_s[j] = k_s[j] * T.if_then_else(sums_s[0] > LARGEST, L2_NORM_SHRINK, 1.0)
                                q_s[j] = q_s[j] * T.if_then_else(sums_s[1] > LARGEST, L2_NORM_SHRINK, 1.0)
                            for x, j in T.Parallel(4, K):
                                rows[x, j] = T.if_then_else(x == 1, q_s[j], k_s[j]) * T.if_then_else(
                                    x == 0, k_s[j], q_s[j]
                                )
                            T.reduce_sum(rows, sums, dim=1)
                            for x in T.Parallel(4):
                                sums_s[x] = sums[x]
                    for i, j in T.Parallel(block_V, K):
                        product[i, j] = tile[i, j] * (a_s[j] * k_s[j])
                    T.reduce_sum(product, read_k, dim=1)
                    for i, j in T.Parallel(block_V, K):
                        product[i, j] = tile[i, j] * (a_s[j] * q_s[j])
                    T.reduce_sum(product, read_q, dim=1)
                    # The norms join where a row meets nothing but numbers: kk, qq and qk are sums[0], [1] and [2].
                    k_factor = T.rsqrt(sums_s[0] + k_eps) if use_qk_l2norm else 1.0
                    q_factor = scale * (T.rsqrt(sums_s[1] + q_eps) if use_qk_l2norm else 1.0)
                    b = T.cast(beta[batch, bos + t, hv], f32)
                    if use_beta_sigmoid:
                        b = (2.0 if allow_neg_eigval else 1.0) * sigmoid(b)
                    for i in T.Parallel(block_V):
                        delta[i] = (
                            b * k_factor * (T.cast(v[batch, bos + t, hv, column + i], f32) - read_k[i] * k_factor)
                        )
                    for i in T.Parallel(block_V):
                        o[batch, bos + t, hv, column + i] = q_factor * (read_q[i] + sums_s[2] * delta[i])
                    for i, j in T.Parallel(block_V, K):
                        tile[i, j] = tile[i, j] * a_s[j] + k_s[j] * delta[i]
                    if slots_per_token and inplace:
                        slot = -1
                        if t < S:
                            slot = _slot(indices[n, t], first_slot, slots)
                        if slot >= 0:
                            store_state(tile, initial_state, slot, hv, column, state_v_first)
                    if drafts_dtype is not None:  # noqa: SIM102  (known when built, and the next when it runs)
                        if T.And(draft_row >= 0, t < draft_steps):
                            store_state(tile, drafts, draft_row * draft_steps + t, hv, column, state_v_first)
                    if slots_per_token and has_final_state:
                        store_state(tile, final_state, batch * L + bos + t, hv, column, state_v_first)
                if inplace and not slots_per_token:  # noqa: SIM102  (known when built, and the next when it runs)
                    if length > 0:
                        store_state(tile, initial_state, start, hv, column, state_v_first)
                if has_final_state and not slots_per_token:
                    store_state(tile, final_state, n, hv, column, state_v_first)
            else:
                T.clear(tile)
                for t in T.serial(lead + length):
                    row = T.if_then_else(t < lead, t, bos + t - lead)
                    for i in T.Parallel(block_V):
                        o[batch, row, hv, column + i] = 0
                    if slots_per_token and has_final_state:
                        store_state(tile, final_state, batch * L + row, hv, column, state_v_first)
                if has_final_state and not slots_per_token:  # noqa: SIM102
                    if n < sequences:
                        store_state(tile, final_state, n, hv, column, state_v_first)

    return kda_fused_recurrent
