"""Train a very small language model, whose only token mixer is the KDA layer, on a text that comes with Python.

    python examples/train_tiny.py

It reads bytes, so there is no tokenizer and no data set to fetch. The loss starts near ln 256 = 5.5, where the model
knows nothing, and has to fall by a third within 60 steps. After that the model writes on, one byte at a time, from a
cache of fixed size; what it computes there has to agree with one run over the whole text.

Every run starts from the same weights and reads the same pieces, so the backends can be compared by their losses:

    python examples/train_tiny.py --steps 1000 --backend torch --json torch.json
    python examples/train_tiny.py --steps 1000 --backend tilelang --beside torch.json --plot both.png
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kda.golden import rel_rmse
from kda.nn import KimiDeltaAttention, KimiDeltaCache

HIDDEN, HEADS, HEAD_DIM, BLOCKS = 128, 2, 64, 2
BATCH = 8


class Block(nn.Module):
    """A token mixer and a feed-forward layer, each behind a norm and beside a residual connection."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.mixer_norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.mixer = KimiDeltaAttention(HIDDEN, HEADS, HEAD_DIM, backend=backend)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.SiLU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor, cache: KimiDeltaCache | None, keep: bool) -> tuple[Tensor, KimiDeltaCache | None]:
        mixed, cache = self.mixer(self.mixer_norm(x), cache, output_cache=keep)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class Model(nn.Module):
    """From bytes `[B, T]` to the logits of each next byte `[B, T, 256]`."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, HIDDEN)
        self.blocks = nn.ModuleList(Block(backend) for _ in range(BLOCKS))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, 256)

    def forward(
        self, tokens: Tensor, caches: list[KimiDeltaCache | None] | None = None, keep: bool = False
    ) -> tuple[Tensor, list[KimiDeltaCache | None]]:
        """With `keep`, also return each block's cache, from which the next call continues."""
        x, new = self.embedding(tokens), []
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):  # GPU kernels take 16 bits
            for block, cache in zip(self.blocks, caches or [None] * BLOCKS, strict=True):
                x, cache = block(x, cache, keep)
                new.append(cache)
            return self.head(self.norm(x)).float(), new


def train(model: Model, text: Tensor, steps: int, length: int) -> list[float]:
    """Minimise the cross entropy of the next byte on random pieces of the text; return the loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(text) - length, (BATCH,))
        pieces = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
        logits, _ = model(pieces[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(10, steps // 10) == 0 or step == steps - 1:
            print(f"step {step:{len(str(steps))}d}  loss {losses[-1]:.3f}")
    return losses


@torch.no_grad()
def written(model: Model, prompt: bytes, count: int) -> bytes:
    """The prompt and `count` more bytes, each drawn from what the model expects and decoded from the caches alone."""
    text = torch.tensor([list(prompt)], device=model.head.weight.device)
    logits, caches = model(text, keep=True)
    for _ in range(count):
        token = torch.multinomial(logits[:, -1].mul(2.0).softmax(-1), 1)
        text = torch.cat([text, token], 1)
        logits, caches = model(token, caches, keep=True)
    at_once, _ = model(text)
    assert rel_rmse(logits[:, -1], at_once[:, -1]) < 0.02, "decoding differs from one run"
    return bytes(text[0].tolist())


def plot(runs: dict[str, list[float]], file: Path) -> None:
    """A picture of the losses of each run, averaged over the last 20 steps so that the curves can be told apart."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(8, 5), layout="constrained")).subplots()
    for (name, losses), style in zip(runs.items(), itertools.cycle(["-", "--", ":"])):
        pieces = (losses[max(0, step - 19) : step + 1] for step in range(len(losses)))
        axes.plot([sum(piece) / len(piece) for piece in pieces], label=name, linestyle=style)
    axes.set(xlabel="step", ylabel="cross entropy of the next byte, nats")
    axes.legend()
    figure.savefig(file, dpi=150)


def options() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description="Train a very small language model whose token mixer is KDA.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto", help="auto (default), tilelang, pypto or torch")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--length", type=int, default=64, help="tokens in each piece of the text (64)")
    parser.add_argument("--json", type=Path, help="write the losses to this file")
    parser.add_argument("--beside", type=Path, nargs="+", default=[], help="such files of other runs, for the picture")
    parser.add_argument("--plot", type=Path, help="draw the losses into this file, .png or .svg (needs matplotlib)")
    return parser.parse_args()


def main() -> None:
    args = options()
    torch.set_num_threads(1)  # of a CPU: the tensors are small, and several threads would mostly wait for each other
    torch.manual_seed(0)
    words = " ".join(topics.values()).split()  # what `help("CLASSES")` and the like show
    text = torch.tensor(list(" ".join(words).encode()), device=args.device)
    model = Model(args.backend).to(args.device)
    losses = train(model, text, args.steps, args.length)
    mine = {f"{args.backend} on {args.device}": losses}
    if args.json:
        args.json.write_text(json.dumps(mine))
    if args.plot:
        others = [json.loads(file.read_text()) for file in args.beside]
        plot({name: run for found in [*others, mine] for name, run in found.items()}, args.plot)
    print(written(model, b"The following", 60))
    first, last = losses[0], sum(losses[-5:]) / 5
    print(f"the loss fell from {first:.2f} to {last:.2f}; a guess among 256 bytes costs {math.log(256):.2f}")
    assert last < 2 / 3 * first, "the loss did not fall"


if __name__ == "__main__":
    main()
