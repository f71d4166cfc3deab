"""The states on the way through chunk_kda, in the tensors that the caller has for them."""

from __future__ import annotations

import pytest
import torch
from pool_calls import FRESH, SLOTS, pooled

import kda
from kda import golden
from kda.golden import inputs, recurrent_kda_golden

LENGTHS = [130, 0, 3, 64, 70]


def call(**options: object) -> dict[str, object]:
    made = inputs.stable(1, 270, 1, 16, 8, 2, dtype=torch.float32, lengths=LENGTHS, initial_state=True)
    return made | options


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_state_a_sequence(dtype: torch.dtype) -> None:
    """At chunk borders from the start to the end; what no border has, or no sequence reaches, is not written."""
    made = call()
    for offsets in ([64, 0, 0, 64, -1], [128, -1, 64, 0, 64], [130, 64, 3, 32, 128]):
        states = torch.full((5, 2, 8, 16), 7.0, dtype=dtype)
        keywords = {"checkpoint_offsets": torch.tensor(offsets, dtype=torch.int32), "checkpoint_states": states}
        o, final = kda.chunk_kda(**made, **keywords)
        assert torch.equal(o, kda.chunk_kda(**made)[0]) and torch.equal(final, kda.chunk_kda(**made)[1])
        start = 0
        for n, (offset, length) in enumerate(zip(offsets, LENGTHS, strict=True)):
            expected = torch.full((2, 8, 16), 7.0)
            if offset % 64 == 0 and 0 <= offset <= length:
                part = {name: made[name][:, start : start + offset] for name in ("q", "k", "v", "g", "beta")}
                first = made["initial_state"][n : n + 1]
                expected = recurrent_kda_golden(**part, initial_state=first, output_final_state=True)[1][0]
            close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-5}
            torch.testing.assert_close(states[n].double(), expected.double(), **close)
            start += length


@pytest.mark.parametrize("v_first", [True, False])
def test_the_state_before_every_chunk(v_first: bool) -> None:
    shape = (8, 16) if v_first else (16, 8)
    made = inputs.stable(1, 270, 1, 16, 8, 2, dtype=torch.float32, lengths=LENGTHS, initial_state=True,
                         state_v_first=v_first)  # fmt: skip
    h = golden.chunk_kda_stages(**made)["h"]
    chunks = torch.full((9, 2, *shape), 7.0)
    kda.chunk_kda(**made, chunk_states=chunks)
    torch.testing.assert_close((chunks[:7].mT if v_first else chunks[:7]).double(), h, rtol=1e-5, atol=1e-5)
    assert (chunks[7:] == 7).all(), "rows beyond the chunks"
    batch = inputs.stable(3, 70, 2, 16, dtype=torch.float32)
    chunks = torch.empty(3, 2, 2, 16, 16, dtype=torch.bfloat16)
    kda.chunk_kda(**batch, chunk_states=chunks)
    h = golden.chunk_kda_stages(**batch)["h"].mT.view(chunks.shape)
    torch.testing.assert_close(chunks.double(), h, rtol=8e-3, atol=1e-5)


def test_beside_a_pool() -> None:
    """From the slot that the sequence starts from, or zeros; nothing for sequences that take no part."""
    made = pooled(has_initial_state=FRESH)
    states = torch.full((6, 2, 128, 64), 7.0)
    kda.chunk_kda(**made, checkpoint_offsets=torch.zeros(6, dtype=torch.long), checkpoint_states=states)
    expected = torch.where(FRESH.view(-1, 1, 1, 1), made["initial_state"][SLOTS.clamp(min=0)], 0.0)
    live = [0, 1, 3, 5]
    assert torch.equal(states[live], expected[live]) and (states[[2, 4]] == 7).all()


def test_without_tokens() -> None:
    made = {name: x[:, :0] if name in ("q", "k", "v", "g", "beta") else x for name, x in call().items()}
    made["cu_seqlens"] = torch.zeros(6, dtype=torch.int32)
    states = torch.full((5, 2, 8, 16), 7.0)
    kda.chunk_kda(**made, checkpoint_offsets=torch.tensor([0, -1, 64, 0, 0]), checkpoint_states=states)
    assert torch.equal(states[[0, 3, 4]], made["initial_state"][[0, 3, 4]]) and (states[1:3] == 7).all()
