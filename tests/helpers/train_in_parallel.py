"""One of two processes that train two layers together, for tests: each sees half of a batch.

    python train_in_parallel.py RANK FOLDER

They meet by a file in FOLDER, so no port is taken. Rank 0 leaves there, in `found`, what `torch.save` makes of the
gradients by DDP and by FSDP2, and of the parameters that layers without memory get under FSDP2: by their names.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from kda.nn import KimiDeltaAttention


class Mixer(KimiDeltaAttention):
    """The layer, without a cache and beside a residual connection."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x + super().forward(x)[0]


def model(device: str = "cpu") -> nn.Sequential:
    """Two layers of three heads, which two processes cannot share evenly."""
    torch.manual_seed(0)
    return nn.Sequential(*(Mixer(8, 3, 4, device=device, dtype=torch.float64) for _ in range(2)))


def batch() -> Tensor:
    """[4, 70, 8]: two sequences for each process, longer than a chunk."""
    return torch.randn(4, 70, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Of a mean over the batch, as in training: so the processes' gradients are averaged."""
    module(x).square().mean().backward()
    return {name.removeprefix("module."): whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def whole(x: Tensor) -> Tensor:
    """A tensor of which each process may have a part."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def sharded(module: nn.Sequential) -> nn.Sequential:
    """The module under FSDP2, each layer by itself."""
    mesh = init_device_mesh("cpu", (2,))
    for part in (*module, module):
        fully_shard(part, mesh=mesh)
    return module


def with_memory(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a module made on the device meta, once they have memory and values."""
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.constant_(parameter, float("nan"))
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    return {name: whole(x.detach()) for name, x in module.named_parameters()}


def main(rank: int, folder: Path) -> None:
    """Compute all three, and let rank 0 save them."""
    torch.set_num_threads(1)
    meet, patience = f"file://{folder / 'meet'}", timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=meet, timeout=patience, rank=rank, world_size=2)
    mine = batch().chunk(2)[rank]
    found = {
        "DDP": gradients(nn.parallel.DistributedDataParallel(model()), mine),
        "FSDP2": gradients(sharded(model()), mine),
        "meta": with_memory(sharded(model("meta"))),
    }
    if rank == 0:
        torch.save(found, folder / "found")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
