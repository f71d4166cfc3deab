"""The constant matrices of the PyPTO kernels, and what else their hosts remember."""

from __future__ import annotations

import torch

from kda.backends.pypto import host
from kda.backends.pypto.kernels import constants


def test_levels_part_the_strict_lower_triangle():
    C = constants.CHUNK
    blocks = constants.masks(torch.device("cpu")).view(-1, C, C)
    levels = blocks[: len(constants.HALVES)].sum(0)
    lower = torch.ones(C, C).tril()
    assert torch.equal(levels, lower.tril(-1).long())
    assert torch.equal(blocks[constants.LOWER], lower.bool())
    assert torch.equal(blocks[constants.STRICTLY_LOWER], lower.tril(-1).bool())
    assert torch.equal(blocks[constants.IDENTITY], torch.eye(C, dtype=torch.bool))
    leaves = blocks[constants.UNIT][:, : constants.LEAF].view(-1, constants.LEAF, constants.LEAF)
    assert torch.equal(leaves, torch.eye(constants.LEAF, dtype=torch.bool).expand_as(leaves))


def test_decay_sums_meet_at_the_borders():
    """For every pair of rows, the two sums of its level are together what lies between the rows."""
    C, cpu = constants.CHUNK, torch.device("cpu")
    g = torch.rand(C, dtype=torch.float64)
    G = g.cumsum(0)
    sums = (constants.decay_sums(cpu).double() @ g).view(-1, C)
    masks = constants.masks(cpu).view(-1, C, C)
    for level in range(len(constants.HALVES)):
        i, j = masks[level].nonzero().unbind(1)
        torch.testing.assert_close(sums[level, i] + sums[level, j], G[i] - G[j])
    torch.testing.assert_close(sums[constants.FROM_START], G)
    torch.testing.assert_close(sums[constants.TO_END], G[-1] - G)


def test_what_is_remembered_in_inference_mode_serves_outside_of_it():
    remembered = [
        (constants.decay_sums, ()), (constants.masks, ()), (host._equal_bounds, (2, 3)), (host._filled, (1.0, 2, 64))
    ]  # fmt: skip
    for make, arguments in remembered:
        make.cache_clear()
        with torch.inference_mode():
            make(*arguments, torch.device("cpu"))
        assert not make(*arguments, torch.device("cpu")).is_inference()
