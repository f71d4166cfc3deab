"""M1 without the cumsum, on rows of one head: L2 norm, scale, gate and the step size, all in fp32.

    q, k  x / sqrt(Σ x² + 1e-6), q times scale          beta  sigmoid(x), or twice that
    g     -rate softplus(x + bias), or lower_bound sigmoid(rate (x + bias)); then at least MIN_LOG_DECAY

q, k and g `[rows, K]`, beta `[rows, 1]`; rows past the end of a sequence are not valid and stay so.
"""

import pypto

from kda.golden.constants import L2_NORM_EPS, L2_NORM_SHRINK, MIN_LOG_DECAY

from ..config import Config
from .tiles import Tiles, use_tiles

TINY = 1e-36
"""Added to the squares of a shrunk row: nothing to a row that needs it, and enough to make that of any other small."""


def activate(q: pypto.Tensor, k: pypto.Tensor, v: pypto.Tensor, g: pypto.Tensor, beta: pypto.Tensor,
             rate: pypto.Tensor, bias: pypto.Tensor, config: Config) -> Tiles:  # fmt: skip
    """M1 without the cumsum: q, k, g `[CHUNK, K]`, v `[CHUNK, V]`, beta `[CHUNK, 1]`; rate and bias `[1, K]`.

    A row that is filled with 0 neither decays nor writes, and G stays flat over it: the chunk's last row has the decay
    of the sequence's last token.
    """
    use_tiles()
    tiles = {
        "q": queries(q, norm(q, config), config), "k": keys(k, norm(k, config)), "v": pypto.cast(v, pypto.DT_FP32),
        "g": log_decay(g, rate, bias, config), "beta": step_size(beta, config),
    }  # fmt: skip
    return {name: padded(tile) for name, tile in tiles.items()}


def padded(rows: pypto.Tensor) -> pypto.Tensor:
    """0 in the rows that are not valid."""
    return pypto.fillpad(rows, "constant", 0.0)


def norm(x: pypto.Tensor, config: Config) -> pypto.Tensor | None:
    """sqrt(Σ x² + 1e-6) of each row `[rows, 1]`, if the call asks for it."""
    if not config.norm:
        return None
    x = pypto.cast(x, pypto.DT_FP32)
    plain = pypto.sqrt(pypto.sum(x * x, -1, keepdim=True) + L2_NORM_EPS)
    # Of a row whose squares are beyond fp32 that is infinite, and this is right; of any other this is the larger one.
    small = x * L2_NORM_SHRINK
    enlarged = pypto.sqrt(pypto.sum(small * small, -1, keepdim=True) + TINY) * (1.0 / L2_NORM_SHRINK)
    return pypto.minimum(plain, enlarged)


def keys(k: pypto.Tensor, norm: pypto.Tensor | None) -> pypto.Tensor:
    """`[rows, K]`; `norm` as above."""
    k = pypto.cast(k, pypto.DT_FP32)
    return k if norm is None else k / norm


def queries(q: pypto.Tensor, norm: pypto.Tensor | None, config: Config) -> pypto.Tensor:
    """As keys, and scaled."""
    return keys(q, norm) * config.scale


def log_decay(g: pypto.Tensor, rate: pypto.Tensor, bias: pypto.Tensor, config: Config) -> pypto.Tensor:
    """`[rows, K]` in [MIN_LOG_DECAY, 0]; rate = exp(A_log) and bias `[1, K]`."""
    g = pypto.cast(g, pypto.DT_FP32)
    if config.gate:
        g = g + bias
        g = _softplus(g) * rate * -1.0 if config.lower_bound is None else _sigmoid(g * rate) * config.lower_bound
    return pypto.maximum(g, MIN_LOG_DECAY)


def step_size(beta: pypto.Tensor, config: Config) -> pypto.Tensor:
    """`[rows, 1]`."""
    beta = pypto.cast(beta, pypto.DT_FP32)
    if not config.sigmoid:
        return beta
    beta = _sigmoid(beta)
    return beta * 2.0 if config.neg_eigval else beta


def _sigmoid(x: pypto.Tensor) -> pypto.Tensor:
    """exp(min(x, 0)) / (1 + exp(-|x|)), by hand: PyPTO's own divides by a full tile, whatever rows of x are valid.

    A true division, because A2 and A3 compute reciprocals to less than 1e-4 alone; and nothing overflows.
    """
    return pypto.exp(pypto.minimum(x, 0.0)) / (pypto.exp(pypto.abs(x) * -1.0) + 1.0)


def _softplus(x: pypto.Tensor) -> pypto.Tensor:
    return pypto.maximum(x, 0.0) + pypto.log1p(pypto.exp(pypto.abs(x) * -1.0))
