"""fused_recurrent_kda, one kernel: sequences x value heads x tokens, in order, on vector units alone.

    S <- S diag(exp g)        S <- S + beta (v - S k) kᵀ        o = S q          S: [V, K]

Tensors as in `chunk`. Sequence n starts from state start[n] of `initial`; below 0 it takes no part in the call.
Its last state goes to state target[n, 0] of `final`; with config.per_token, the state after its i-th token goes to
target[n, i] instead, the last column standing for all tokens behind it. Below 0, nothing is written. `initial` and
`final` may be one tensor: no sequence reads a state that another one writes. start `[N]` and target `[N, S]` int32.
"""

import pypto

from ..config import Config
from .activation import keys, log_decay, norm, queries, step_size
from .chunk import BOUNDS, DYNAMIC, PARAMETER, ROWS, STATES
from .rows import Index, load_state, parameter, state, store_state
from .tiles import begin_task, end_task, use_tiles


def fused_recurrent_kda(
    q: pypto.Tensor(ROWS), k: pypto.Tensor(ROWS), v: pypto.Tensor(ROWS), g: pypto.Tensor(ROWS),
    beta: pypto.Tensor(ROWS), rate: pypto.Tensor(PARAMETER), bias: pypto.Tensor(PARAMETER),
    cu: pypto.Tensor(BOUNDS), initial: pypto.Tensor(STATES), start: pypto.Tensor(BOUNDS),
    target: pypto.Tensor([DYNAMIC, DYNAMIC]), o: pypto.Tensor(ROWS), final: pypto.Tensor(STATES), config,
):  # fmt: skip
    use_tiles()
    for n in pypto.loop(start.shape[0], name="sequences", idx_name="n"):
        slot = start[n]
        if slot >= 0:
            for head in pypto.loop(v.shape[1], name="heads", idx_name="head"):
                begin = cu[n]
                end = cu[n + 1]
                if end - begin == 1:  # as in decoding: one task, for which the buffer is just large enough
                    begin_task(1)
                    S_0 = state(initial, slot, head, config)
                    S_1 = token(q, k, v, g, beta, rate, bias, begin, head, S_0, o, config)
                    to = target[n, 0]
                    if to >= 0:
                        store_state(S_1, final, to, head, config)
                    end_task()
                else:
                    S = load_state(initial, slot, head, config)
                    for t in pypto.loop(begin, end, name="tokens", idx_name="t"):
                        S_t = token(q, k, v, g, beta, rate, bias, t, head, S, o, config)
                        S[:] = S_t
                        if config.per_token:
                            to = target[n, (t - begin).min(target.shape[1] - 1)]
                            if to >= 0:
                                store_state(S, final, to, head, config)
                    if not config.per_token:
                        to = target[n, 0]
                        if to >= 0:
                            store_state(S, final, to, head, config)


def token(
    q: pypto.Tensor, k: pypto.Tensor, v: pypto.Tensor, g: pypto.Tensor, beta: pypto.Tensor, rate: pypto.Tensor,
    bias: pypto.Tensor, t: Index, head: Index, S: pypto.Tensor, o: pypto.Tensor, config: Config,
) -> pypto.Tensor:  # fmt: skip
    """The state after token t of a head, whose output goes to `o`."""
    q, k = (row(x, t, head // config.group) for x in (q, k))
    out, S = step(
        queries(q, norm(q, config), config), keys(k, norm(k, config)), column(v, t, head),
        log_decay(row(g, t, head), parameter(rate, head), parameter(bias, head), config),
        step_size(row(beta, t, head), config), S,
    )  # fmt: skip
    store_column(out, o, t, head)
    return S


def step(q: pypto.Tensor, k: pypto.Tensor, v: pypto.Tensor, g: pypto.Tensor, beta: pypto.Tensor, S: pypto.Tensor
         ) -> tuple[pypto.Tensor, pypto.Tensor]:  # fmt: skip
    """o `[V, 1]` and the state after one token; q, k, g `[1, K]`, v `[V, 1]`, beta `[1, 1]`, S `[V, K]`."""
    S = S * pypto.exp(g)
    delta = (v - pypto.sum(S * k, -1, keepdim=True)) * beta
    S = S + pypto.expand_clone(delta, S.shape) * k
    return pypto.sum(S * q, -1, keepdim=True), S


def row(x: pypto.Tensor, t: Index, head: Index) -> pypto.Tensor:
    """Token t of a head in `x` `[T, heads, D]`, as `[1, D]`."""
    D = x.shape[2]
    pypto.set_vec_tile_shapes(1, 1, max(D, 16))
    token = pypto.reshape(pypto.view(x, [1, 1, D], [t, head, 0]), [1, D])
    use_tiles()
    return token


def column(x: pypto.Tensor, t: Index, head: Index) -> pypto.Tensor:
    """The same in fp32, as `[D, 1]`."""
    return pypto.reshape(pypto.cast(row(x, t, head), pypto.DT_FP32), [x.shape[2], 1])


def store_column(x: pypto.Tensor, out: pypto.Tensor, t: Index, head: Index) -> None:
    """`x` `[D, 1]` to token t of a head in `out` `[T, heads, D]`, in its dtype."""
    D = x.shape[0]
    token = pypto.cast(pypto.reshape(x, [1, D]), out.dtype)
    pypto.set_vec_tile_shapes(1, 1, D)
    pypto.assemble(pypto.reshape(token, [1, 1, D]), [t, head, 0], out)
    use_tiles()
