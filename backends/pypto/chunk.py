"""A call of chunk_kda on its way to the kernel: allocation and layout alone.

No tensor value comes to the host, `stages` excepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda.backends.call import KdaCall

from .build import run
from .config import config
from .host import bounds, initial_states, output, rows
from .kernels import constants
from .kernels.chunk import chunk_kda as chunk_kernel
from .kernels.chunk_stages import NAMES, chunk_kda_stages


def chunk_kda(call: KdaCall) -> tuple[Tensor, Tensor | None]:
    """Run the call: o in v's shape and dtype, and the final state if the call asks for it."""
    o = output(call)
    initial = initial_states(call)
    final = torch.empty_like(initial)
    inputs = [*rows(call), bounds(call), initial, *_constants(call.q.device)]
    run(chunk_kernel, inputs, [o.view(-1, call.HV, call.V), final], config(call))
    return o, final if call.output_final_state else None


def stages(call: KdaCall) -> dict[str, Tensor]:
    """The tensors of M1 to M4 under the golden's names and in its layout, CHUNK tokens a chunk, in fp32."""
    cu = bounds(call)
    counts = (cu.diff() + constants.CHUNK - 1) // constants.CHUNK
    chunks, C, K, V = int(counts.sum()), constants.CHUNK, call.K, call.V
    shapes = {"beta": (C, 1), "Akk": (C, C), "Aqk": (C, C), "Ainv_t": (C, C), "decay": (1, K), "u": (C, V)}
    shapes |= {"h": (V, K), "v_new": (C, V)}
    tables = {name: call.v.new_zeros(chunks, call.HV, *shapes.get(name, (C, K)), dtype=torch.float32) for name in NAMES}
    if chunks:
        first = (counts.cumsum(0) - counts).to(torch.int32)
        inputs = [*rows(call), cu, initial_states(call), *_constants(call.q.device), first]
        run(chunk_kda_stages, inputs, list(tables.values()), config(call))
    tables["beta"], tables["decay"], tables["h"] = tables["beta"][..., 0], tables["decay"][..., 0, :], tables["h"].mT
    tables["Ainv"] = tables.pop("Ainv_t").mT
    return tables


def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    return constants.decay_sums(device), constants.masks(device)
