"""Level 4, the delta rule: S <- S + beta k (v - kᵀ S)ᵀ, o = qᵀ S (arXiv:2102.11174; in chunks arXiv:2406.06484).

What is new: a token writes not v, but what the state lacks of it. In a chunk that is a triangular system, since what
token i finds in the state is what came in and what the tokens before it in the chunk have written:

    v_new_i = beta_i (v_i - k_iᵀ S - Σ_{j < i} (k_i k_j) v_new_j)
    v_new = T (V - K S),     T = (I + tril(diag(beta) K Kᵀ, -1))⁻¹ diag(beta)

The rest is level 1 with v_new for v. Since v_new needs S, no sum over all chunks at once is left: form B is a loop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .chunks import join, split


def recurrent(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Form A: level 1 with beta times what is missing instead of v. beta `[B, N, H]`, the step size."""
    q, k, v, beta = q.double(), k.double(), v.double(), beta.double()
    o = torch.empty_like(v)
    S = k.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    for t in range(v.shape[1]):
        v_new = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + k[:, t, :, :, None] * v_new[:, :, None, :]
        o[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], S)
    return o


def chunked(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, BC: int) -> Tensor:
    """Form B: level 1 chunk by chunk, with v_new instead of v. beta `[B, N, H]`, the step size."""
    qc, kc, vc, bc = split(q, BC), split(k, BC), split(v, BC), split(beta, BC)[..., None]
    o = torch.empty_like(vc)
    eye = torch.eye(BC, dtype=torch.float64, device=q.device)
    S = kc.new_zeros(*kc.shape[:2], k.shape[3], v.shape[3])
    for c in range(qc.shape[2]):
        Q, K, V, b = qc[:, :, c], kc[:, :, c], vc[:, :, c], bc[:, :, c]
        missing = b * (V - K @ S)
        v_new = torch.linalg.solve_triangular(eye + (b * (K @ K.mT)).tril(-1), missing, upper=False)
        o[:, :, c] = Q @ S + (Q @ K.mT).tril() @ v_new
        S = S + K.mT @ v_new
    return join(o, q.shape[1])
