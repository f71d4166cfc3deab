"""M1-M3 of every chunk, in parallel over (entry, value head).

With a_t = exp(g_t) per channel, and k = v = beta = 0, a = 1 past a sequence's end:

    qg_i = scale q_i  Π(t <= i) a_t        kg_i = k_i  Π(t > i) a_t        decay = Π a_t
    Aqk_ij = scale Σ_c q_i k_j  Π(j < t <= i) a_t          (j <= i)
    Akk_ij = beta_i Σ_c k_i k_j  Π(j < t <= i) a_t         (j < i)
    Ainv = (I + Akk)⁻¹        w = Ainv diag(beta) (k_i Π(t <= i) a_t)        u = Ainv diag(beta) v

in (dtype; B = 1 in the varlen form):
    q, k [B, T, H, K]   v [B, T, HV, V]   g [B, T, HV, K]   beta [B, T, HV]   A_log [HV], dt_bias [HV * K] fp32
out: qg, kg, w, u, Aqk and, if asked for, Ainv in table [entries, HV, 64, width] (chunk_table.py),
    decay [entries, HV, K] fp32

Aqk and Akk: see scores.py; the inverse: see inverse.py.

Precision. Operands of Aqk and Akk are unit rows times factors <= 1 in fp16, at every 16-bit dtype: they fit it, and it
rounds eight times finer than bf16. Norms, scale and beta join in fp32 afterwards. Ainv enters w and u as a sum of
two matrices of the dtype, since near-identical keys cannot bear one bf16 matrix. decay is taken from the sum of g: over
many chunks a product of 64 rounded factors would drift.
"""

from typing import Any

import tilelang.language as T
from tilelang import PassConfigKey

from kda.golden.constants import CHUNK_SIZE as C

from ..chunk_table import columns
from .activation import log2_gate, rate, sigmoid
from .inverse import inverse_times_beta
from .plan import chunk
from .rows import load_rows, unit_rows
from .scores import HALF, LEVELS_WITHIN_HALVES, level_operands, norm, store_level
from .wy import corrections

_PASS_CONFIGS = {
    PassConfigKey.TL_ENABLE_FAST_MATH: True,  # exp2, log2 and rsqrt as one instruction each
    PassConfigKey.TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE: True,  # 89 KiB, not 130: two blocks a multiprocessor
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
    """Kernel (q, k, v, g, beta, [A_log, dt_bias], [lower_bound], scale, [cu_seqlens, owner] | seq_len,
    table, decay).

    A_log and dt_bias exist with `use_gate`, lower_bound (a float) with `bounded_gate` too; cu_seqlens [N + 1] and
    owner [entries] in the varlen form, else seq_len (an int). scale is a float. Unused entries are left as they are.
    """
    f32 = "float32"
    split = dtype != f32
    operand_dtype = "float16" if split else f32
    at = columns(K, V, with_ainv=with_ainv)
    B, L, entries, N1 = T.dynamic("B, L, entries, N1")
    a_log_t = T.Tensor((HV,), f32) if use_gate else None
    dt_bias_t = T.Tensor((HV * K,), f32) if use_gate else None
    lower_bound_t = T.float32 if bounded_gate else None
    cu_seqlens_t = T.Tensor((N1,), cu_dtype) if varlen else None
    owner_t = T.Tensor((entries,), "int32") if varlen else None
    seq_len_t = None if varlen else T.int32

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
        with T.Kernel(entries * HV, threads=128) as block:
            hv = block % HV
            hk = hv // (HV // H)
            entry = block // HV
            t0, rows = chunk(entry, cu_seqlens, owner, seq_len, varlen)
            if rows > 0:
                # Unit rows of q and k, what turns them back, and beta.
                q_s = T.alloc_shared((C, K), operand_dtype)
                k_s = T.alloc_shared((C, K), operand_dtype)
                q_norm = None if use_qk_l2norm else T.alloc_shared((C,), f32)
                k_norm = None if use_qk_l2norm else T.alloc_shared((C,), f32)
                q_dot_k = T.alloc_shared((C,), f32)
                beta_s = T.alloc_shared((C,), f32)
                unit_rows(q, k, t0, rows, hk, q_s, k_s, q_norm, k_norm, q_dot_k)
                for i in T.Parallel(C):
                    b = T.cast(T.if_then_else(i < rows, beta[t0 + i, hv], T.cast(0, beta_dtype)), f32)
                    if use_beta_sigmoid:
                        b = (2.0 if allow_neg_eigval else 1.0) * sigmoid(b)
                    beta_s[i] = T.if_then_else(i < rows, b, 0.0)

                # Decays: a[r, h] is row 32 h + r, and a thread keeps whole columns of it.
                a = T.alloc_fragment((HALF, 2, K), f32)
                run = T.alloc_fragment((2, K), f32)
                bias = T.alloc_fragment((2, K), f32)
                log2_a = T.alloc_fragment((2, K), f32)
                log2_half = T.alloc_fragment((2, K), f32)
                log2_half_s = T.alloc_shared((2, K), f32)
                A = rate(A_log, hv, use_gate)
                for h, c in T.Parallel(2, K):
                    bias[h, c] = dt_bias[hv * K + c] if use_gate else 0.0
                T.clear(log2_half)
                for r in T.unroll(HALF):
                    for h, c in T.Parallel(2, K):
                        log2_a[h, c] = T.if_then_else(
                            h * HALF + r < rows, g[t0 + h * HALF + r, hv, c], T.cast(0, g_dtype)
                        )
                    for h, c in T.Parallel(2, K):
                        log2_a[h, c] = log2_gate(log2_a[h, c], bias[h, c], A, lower_bound, use_gate, bounded_gate)
                        if use_gate:
                            log2_a[h, c] = T.if_then_else(h * HALF + r < rows, log2_a[h, c], 0.0)
                        log2_half[h, c] = log2_half[h, c] + log2_a[h, c]
                        a[r, h, c] = T.exp2(log2_a[h, c])
                for h, c in T.Parallel(2, K):
                    log2_half_s[h, c] = log2_half[h, c]
                for c in T.Parallel(K):
                    decay[entry, hv, c] = T.exp2(log2_half_s[0, c] + log2_half_s[1, c])

                # The bisection's level 32 walks whole halves: qg, w's operand and kg come on the same way.
                right_s = T.alloc_shared((C, K), operand_dtype)
                left_s = T.alloc_shared((HALF, K), operand_dtype)
                k_decayed_s = T.alloc_shared((C, K), dtype)
                factor = T.alloc_fragment((2, K), operand_dtype)
                q_row = T.alloc_fragment((2, K), operand_dtype)
                k_row = T.alloc_fragment((2, K), operand_dtype)
                before = T.alloc_fragment((2, K), f32)
                after = T.alloc_fragment((2, K), f32)
                for h, c in T.Parallel(2, K):
                    before[h, c] = T.if_then_else(h == 1, T.exp2(log2_half_s[0, c]), 1.0)
                    after[h, c] = T.if_then_else(h == 0, T.exp2(log2_half_s[1, c]), 1.0)
                T.fill(run, 1.0)
                for r in T.unroll(HALF):
                    for h, c in T.Parallel(2, K):
                        run[h, c] = run[h, c] * a[r, h, c]
                        factor[h, c] = run[h, c]
                        q_row[h, c] = q_s[h * HALF + r, c] * factor[h, c]
                        k_row[h, c] = k_s[h * HALF + r, c] * factor[h, c]
                        table[entry, hv, h * HALF + r, c] = (
                            q_s[h * HALF + r, c] * run[h, c] * (before[h, c] * scale * norm(q_norm, h * HALF + r))
                        )
                        k_decayed_s[h * HALF + r, c] = (
                            k_s[h * HALF + r, c] * run[h, c] * (before[h, c] * norm(k_norm, h * HALF + r))
                        )
                    for h, c in T.Parallel(2, K):
                        if h == 1:
                            right_s[r, c] = q_row[h, c]
                            right_s[r + HALF, c] = k_row[h, c]
                T.fill(run, 1.0)
                for r in T.unroll(HALF):
                    for h, c in T.Parallel(2, K):
                        factor[h, c] = run[h, c]
                        k_row[h, c] = k_s[h * HALF + HALF - 1 - r, c] * factor[h, c]
                        table[entry, hv, h * HALF + HALF - 1 - r, at.kg + c] = (
                            k_s[h * HALF + HALF - 1 - r, c]
                            * run[h, c]
                            * (after[h, c] * norm(k_norm, h * HALF + HALF - 1 - r))
                        )
                        run[h, c] = run[h, c] * a[HALF - 1 - r, h, c]
                    for h, c in T.Parallel(2, K):
                        if h == 0:
                            left_s[HALF - 1 - r, c] = k_row[h, c]

                # Aqk, and Akk as its two diagonal blocks and the block below them.
                aqk_s = T.alloc_shared((C, C), dtype)
                akk_s = T.alloc_shared((2, HALF, HALF), f32)
                akk_low_s = T.alloc_shared((HALF, HALF), operand_dtype)
                level = T.alloc_fragment((C, HALF), f32)
                aqk_level = T.alloc_fragment((HALF, HALF), dtype)
                akk_low = T.alloc_fragment((HALF, HALF), operand_dtype)
                T.clear(aqk_s)
                T.gemm(right_s, left_s, level, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                for i in T.Parallel(C):
                    aqk_s[i, i] = scale * q_dot_k[i]
                for i, j in T.Parallel(HALF, HALF):
                    aqk_s[HALF + i, j] = level[i, j] * (scale * norm(q_norm, HALF + i) * norm(k_norm, j))
                for i, j in T.Parallel(HALF, HALF):
                    akk_low[i, j] = level[HALF + i, j] * (beta_s[HALF + i] * norm(k_norm, HALF + i) * norm(k_norm, j))
                # Not T.copy: TileLang 0.1.15 lets the threads that hold no part of such a fragment store as well.
                for i, j in T.Parallel(HALF, HALF):
                    akk_low_s[i, j] = akk_low[i, j]
                for s in LEVELS_WITHIN_HALVES:
                    level_operands(s, a, q_s, k_s, run, factor, right_s, left_s)
                    T.gemm(right_s, left_s, level, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                    store_level(s, level, scale, q_norm, k_norm, beta_s, aqk_level, aqk_s, akk_s)
                T.copy(aqk_s, table[entry, hv, 0:C, at.aqk : at.aqk + C], disable_tma=True)

                # M3; the results leave through their operands' buffers.
                v_s = T.alloc_shared((C, V), dtype)
                step_s = T.alloc_shared((C, C), dtype)
                rest_s = T.alloc_shared((C, C), dtype) if split else None
                ainv_s = T.alloc_shared((C, C), dtype) if with_ainv else None
                load_rows(v, t0, rows, hv, v_s)
                inverse_times_beta(akk_s, akk_low_s, beta_s, step_s, rest_s, ainv_s)
                if with_ainv:
                    T.copy(ainv_s, table[entry, hv, 0:C, at.ainv : at.ainv + C], disable_tma=True)
                corrections(step_s, rest_s, k_decayed_s, K)
                T.copy(k_decayed_s, table[entry, hv, 0:C, at.w : at.w + K], disable_tma=True)
                corrections(step_s, rest_s, v_s, min(V, 128))
                T.copy(v_s, table[entry, hv, 0:C, at.u : at.u + V], disable_tma=True)

    return kda_prepare
