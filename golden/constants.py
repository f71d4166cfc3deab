"""Numbers that every part of the package must agree on; each is defined here and nowhere else."""

CHUNK_SIZE = 64
"""Tokens per chunk of the backends and, unless told otherwise, of the golden."""

SUB_BLOCK = 16
"""Side of the square blocks that M2 (the intra-chunk products and the inverse) is cut into."""

L2_NORM_EPS = 1e-6
"""Added to the sum of squares before the square root: x / sqrt(sum(x²) + eps)."""

L2_NORM_SHRINK = 2.0**-70
"""Where a row's sum of squares is infinite in fp32, the row is multiplied with this first: then no element of fp32 or
bf16 is too large. The eps means nothing to such a row."""

MIN_LOG_DECAY = -104.0
"""A token's log decay is bounded from below here before any cumsum. exp(-104) is 0 in fp32, so the answer is the same,
while -inf - (-inf) = NaN can no longer arise and a sum that has passed thousands keeps its small differences."""

LOWER_BOUND_RANGE = (-5.0, 0.0)
"""Half-open range [-5, 0) of the gate's `lower_bound`."""
