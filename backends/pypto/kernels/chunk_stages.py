"""`chunk_kda` once more, handing out the tensors of M1 to M4: to find the first stage that departs from the golden.

Arguments as in `chunk`; first `[N]` int32 says which row of the tables the first chunk of each sequence has.
Tables are `[chunks, HV, CHUNK, ...]`, decay `[chunks, HV, 1, K]`, h `[chunks, HV, V, K]`, all fp32. Ainv_t is Ainv
transposed.
"""

import pypto

from .carry import carry
from .chunk import BOUNDS, CONSTANT, PARAMETER, ROWS, STATES, prepare
from .constants import CHUNK, FROM_START
from .rows import Index, load_state, store_table
from .tiles import Tiles, block, use_tiles

NAMES = ("q", "k", "beta", "G", "Akk", "Aqk", "Ainv_t", "qg", "kg", "decay", "w", "u", "h", "v_new")
"""The tables, in the order of the kernel's last arguments."""


def chunk_kda_stages(
    q: pypto.Tensor(ROWS), k: pypto.Tensor(ROWS), v: pypto.Tensor(ROWS), g: pypto.Tensor(ROWS),
    beta: pypto.Tensor(ROWS), rate: pypto.Tensor(PARAMETER), bias: pypto.Tensor(PARAMETER),
    cu: pypto.Tensor(BOUNDS), initial: pypto.Tensor(STATES), sums: pypto.Tensor(CONSTANT),
    masks: pypto.Tensor(CONSTANT), first: pypto.Tensor(BOUNDS),
    to_q: pypto.Tensor(STATES), to_k: pypto.Tensor(STATES), to_beta: pypto.Tensor(STATES),
    to_G: pypto.Tensor(STATES), to_Akk: pypto.Tensor(STATES), to_Aqk: pypto.Tensor(STATES),
    to_Ainv_t: pypto.Tensor(STATES), to_qg: pypto.Tensor(STATES), to_kg: pypto.Tensor(STATES),
    to_decay: pypto.Tensor(STATES), to_w: pypto.Tensor(STATES), to_u: pypto.Tensor(STATES),
    to_h: pypto.Tensor(STATES), to_v_new: pypto.Tensor(STATES), config,
):  # fmt: skip
    use_tiles()
    for head in pypto.loop(v.shape[1], name="heads", idx_name="head"):
        for n in pypto.loop(initial.shape[0], name="sequences", idx_name="n"):
            S = load_state(initial, n, head, config)
            start = cu[n]
            end = cu[n + 1]
            row = first[n]
            for c in pypto.loop((end - start + CHUNK - 1) // CHUNK, name="chunks", idx_name="c"):
                t = start + c * CHUNK
                count = (end - t).min(CHUNK)
                tiles = prepare(q, k, v, g, beta, rate, bias, t, head, count, sums, masks, config)
                after = carry(tiles, S)
                G = pypto.matmul(block(sums, FROM_START), tiles["g"], pypto.DT_FP32)
                tables = [to_q, to_k, to_beta, to_G, to_Akk, to_Aqk, to_Ainv_t, to_qg, to_kg, to_decay, to_w, to_u,
                          to_h, to_v_new]  # fmt: skip
                store_all({**tiles, **after, "G": G, "h": S}, tables, row + c, head)
                S[:] = after["S"]


def store_all(tiles: Tiles, tables: list[pypto.Tensor], row: Index, head: Index) -> None:
    """The tiles called NAMES to entry `row` of a head, each in its table."""
    for name, table in zip(NAMES, tables, strict=True):
        store_table(tiles[name], table, row, head)
