"""chunk_kda, one kernel: value heads x sequences x chunks of CHUNK tokens, in order within a sequence.

q, k `[T, H, K]`, v and o `[T, HV, V]`, g `[T, HV, K]`, beta `[T, HV, 1]`; rate and bias `[HV, K]` fp32; cu `[N + 1]`
int32; states `[N, HV, V, K]`, or `[N, HV, K, V]`, fp32; sums and masks from `constants`. T counts the tokens of the
whole batch, and cu says which of them are whose: rows of o outside every sequence are not written. H, HV, T and N are
read from the tensors when the kernel runs, so one build serves them all. No iteration of the two outer loops reads
what another one writes, which leaves PyPTO's scheduler free to spread them over the cores.
"""

import pypto

from ..config import Config
from .activation import activate
from .carry import carry
from .constants import CHUNK, FROM_START
from .inverse import inverse
from .rows import Index, load, load_state, parameter, store, store_state
from .scores import scores
from .tiles import Tiles, block, use_tiles
from .wy import wy

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
                inputs = load_chunk(q, k, v, g, beta, rate, bias, t, head, count, config)
                after = carry(prepare(**inputs, sums=sums, masks=masks), S)
                store(after["o"], o, t, head, count)
                S[:] = after["S"]
            store_state(S, final, n, head, config)


def load_chunk(
    q: pypto.Tensor, k: pypto.Tensor, v: pypto.Tensor, g: pypto.Tensor, beta: pypto.Tensor, rate: pypto.Tensor,
    bias: pypto.Tensor, t: Index, head: Index, count: Index, config: Config,
) -> Tiles:  # fmt: skip
    """The chunk of `count` tokens from t on as one value head sees it, activated."""
    qk_head = head // config.group
    return activate(
        load(q, t, qk_head, count), load(k, t, qk_head, count), load(v, t, head, count), load(g, t, head, count),
        load(beta, t, head, count), parameter(rate, head), parameter(bias, head), config,
    )  # fmt: skip


def prepare(q: pypto.Tensor, k: pypto.Tensor, v: pypto.Tensor, g: pypto.Tensor, beta: pypto.Tensor,
            sums: pypto.Tensor, masks: pypto.Tensor) -> Tiles:  # fmt: skip
    """The cumsum of M1, then M2 and M3: all of a chunk that does not need the state. Rows past its end are 0."""
    log_decays = pypto.matmul(sums, g, pypto.DT_FP32)
    decays = pypto.exp(log_decays)
    Akk, Aqk = scores(q, k, beta, decays, masks)
    Ainv = inverse(Akk, masks)
    tiles = {"G": block(log_decays, FROM_START), "Akk": Akk, "Aqk": Aqk, "Ainv": Ainv}
    return tiles | wy(q, k, v, beta, decays, Ainv)
