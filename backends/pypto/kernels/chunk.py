"""chunk_kda, one kernel: value heads x sequences x chunks of CHUNK tokens, in order within a sequence.

q, k `[T, H, K]`, v and o `[T, HV, V]`, g `[T, HV, K]`, beta `[T, HV, 1]`; rate and bias `[HV, K]` fp32; cu `[N + 1]`
int32; states `[N, HV, V, K]`, or `[N, HV, K, V]`, fp32; sums and masks from `constants`. T counts the tokens of the
whole batch, and cu says which of them are whose: rows of o outside every sequence are not written. H, HV, T and N are
read from the tensors when the kernel runs, so one build serves them all. No iteration of the two outer loops reads
what another one writes, which leaves PyPTO's scheduler free to spread them over the cores.
"""

import pypto

from ..config import Config
from . import block_scores
from .activation import activate, keys, log_decay, norm, padded, queries, step_size
from .carry import carry
from .constants import CHUNK
from .inverse import inverse
from .rows import Index, load, load_columns, load_state, parameter, store, store_state
from .scores import scores
from .tiles import Tiles, begin_task, end_task, use_columns, use_tiles
from .wy import decayed, wy

DYNAMIC, STATIC = pypto.DYNAMIC, pypto.STATIC
ROWS = [DYNAMIC, DYNAMIC, STATIC]
STATES = [DYNAMIC, DYNAMIC, STATIC, STATIC]
PARAMETER = [DYNAMIC, STATIC]
CONSTANT = [STATIC, STATIC]
BOUNDS = [DYNAMIC]


def chunk_kda(
    q: pypto.Tensor(ROWS), k: pypto.Tensor(ROWS), v: pypto.Tensor(ROWS), g: pypto.Tensor(ROWS),
    beta: pypto.Tensor(ROWS), rate: pypto.Tensor(PARAMETER), bias: pypto.Tensor(PARAMETER),
    cu: pypto.Tensor(BOUNDS), initial: pypto.Tensor(STATES), sums: pypto.Tensor(CONSTANT),
    masks: pypto.Tensor(CONSTANT), o: pypto.Tensor(ROWS), final: pypto.Tensor(STATES), config,
):  # fmt: skip
    use_tiles()
    for head in pypto.loop(v.shape[1], name="heads", idx_name="head"):
        for n in pypto.loop(initial.shape[0], name="sequences", idx_name="n"):
            S = load_state(initial, n, head, config)
            start = cu[n]
            end = cu[n + 1]
            # Counted in chunks: an unrolled loop with a step takes a last chunk that is cut short for a negative one.
            for c in pypto.loop((end - start + CHUNK - 1) // CHUNK, name="chunks", idx_name="c", unroll_list=[4, 1]):
                t = start + c * CHUNK
                count = (end - t).min(CHUNK)
                tiles = prepare(q, k, v, g, beta, rate, bias, t, head, count, sums, masks, config)
                after = carry(tiles, S)
                store(after["o"], o, t, head, count)
                S[:] = after["S"]
            store_state(S, final, n, head, config)


def prepare(
    q: pypto.Tensor, k: pypto.Tensor, v: pypto.Tensor, g: pypto.Tensor, beta: pypto.Tensor, rate: pypto.Tensor,
    bias: pypto.Tensor, t: Index, head: Index, count: Index, sums: pypto.Tensor, masks: pypto.Tensor, config: Config,
) -> Tiles:  # fmt: skip
    """M1 to M3 of the `count` tokens from t on, as one value head sees them: all that does not need the state."""
    heads = {"q": head // config.group, "k": head // config.group, "v": head, "g": head, "beta": head}
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    rows = {name: load(x, t, heads[name], count) for name, x in tensors.items()}
    rate, bias = parameter(rate, head), parameter(bias, head)
    if config.bounded:
        begin_task(2)
        columns = {name: load_columns(tensors[name], t, heads[name], count) for name in ("q", "k", "g")}
        end_task()
        tiles = _by_blocks(rows, columns, rate, bias, masks, config)
    else:
        tiles = _by_levels(rows, rate, bias, sums, masks, config)
    Ainv_t = inverse(tiles["Akk"], masks)
    return tiles | {"Ainv_t": Ainv_t} | wy(tiles["kb"], tiles["v"], tiles["beta"], Ainv_t)


def _by_levels(rows: Tiles, rate: pypto.Tensor, bias: pypto.Tensor, sums: pypto.Tensor, masks: pypto.Tensor,
               config: Config) -> Tiles:  # fmt: skip
    """M1, and what of M2 and M3 comes before the inverse, at any gate."""
    tiles = activate(**rows, rate=rate, bias=bias, config=config)
    q, k, beta = tiles["q"], tiles["k"], tiles["beta"]
    decays = pypto.exp(pypto.matmul(sums, tiles["g"], pypto.DT_FP32))
    Akk, Aqk = scores(q, k, beta, decays, masks)
    return tiles | {"Akk": Akk, "Aqk": Aqk} | decayed(q, k, beta, decays)


def _by_blocks(rows: Tiles, columns: Tiles, rate: pypto.Tensor, bias: pypto.Tensor, masks: pypto.Tensor,
               config: Config) -> Tiles:  # fmt: skip
    """The same where gates have a lower bound; q, k and g are loaded once more, by columns."""
    use_tiles()
    v, beta = padded(pypto.cast(rows["v"], pypto.DT_FP32)), padded(step_size(rows["beta"], config))
    norms = {name: norm(rows[name], config) for name in ("q", "k")}
    begin_task(2)
    use_columns()
    q, k = padded(queries(columns["q"], norms["q"], config)), padded(keys(columns["k"], norms["k"]))
    g = padded(log_decay(columns["g"], rate, bias, config))
    tiles, at_pivots, upto = block_scores.decayed(q, k, g, beta)
    end_task()
    Akk, Aqk = block_scores.scores(at_pivots, upto, beta, masks)
    return tiles | {"q": q, "k": k, "v": v, "g": g, "beta": beta, "Akk": Akk, "Aqk": Aqk}
