"""What a kernel is traced for: everything about a call that is not read from a tensor when it runs."""

from __future__ import annotations

from dataclasses import dataclass

from kda.backends.call import KdaCall


@dataclass(frozen=True)
class Config:
    """One build of a kernel. PyPTO tells builds apart by this object's text."""

    K: int
    V: int
    dtypes: tuple[str, str, str]  # of q, of g and of beta
    group: int  # value heads that share a head of q and k
    scale: float
    norm: bool
    gate: bool
    lower_bound: float | None
    sigmoid: bool
    neg_eigval: bool
    state_v_first: bool
    per_token: bool  # fused_recurrent_kda: every token's state is kept
    depth: int  # iterations of the loops that PyPTO's scheduler holds at once, each with workspace of its own

    @property
    def bounded(self) -> bool:
        """No gate is below the lower bound, which callers cannot set below -5."""
        return self.gate and self.lower_bound is not None


DEPTH = 128
"""The most that there can be: PyPTO 0.2.0's scheduler has arrays of this length, and writes past them without a check.
An iteration of chunk_kda takes 14 MB of workspace, used or not."""

SMALL_DEPTH, SMALL_HEADS, SMALL_TOKENS = 32, 8, 4096
"""The depth of calls up to these sizes, which take less than 0.5 GB. There are no more steps, because each is a build
of the kernel."""


def config(call: KdaCall) -> Config:
    """The build that takes `call`."""
    small = call.HV <= SMALL_HEADS and call.B * call.T <= SMALL_TOKENS
    return Config(
        K=call.K, V=call.V, dtypes=(str(call.q.dtype), str(call.g.dtype), str(call.beta.dtype)),
        group=call.HV // call.H, scale=call.scale, norm=call.use_qk_l2norm_in_kernel, gate=call.use_gate_in_kernel,
        lower_bound=call.lower_bound, sigmoid=call.use_beta_sigmoid_in_kernel, neg_eigval=call.allow_neg_eigval,
        state_v_first=call.state_v_first, per_token=call.state_per_token,
        depth=SMALL_DEPTH if small else DEPTH,
    )  # fmt: skip
