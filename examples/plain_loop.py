"""Your own model in your own loop, with parameters and optimizer state in swap files.

python examples/plain_loop.py --nvme /mnt/nvme0 --nvme /mnt/nvme1 --steps 50 --save trained
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn

import infinity
from infinity.data.text import shipped_text


class Model(nn.Module):
    """A byte-level decoder: blocks in a ModuleList are found and gathered one at a time."""

    def __init__(self, width: int, n_blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(n_blocks)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def batch_of(text: torch.Tensor, step: int, size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length - 1, (size,), generator=generator)
    rows = torch.stack([text[start : start + length + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, action="append", help="folder for swap files, one per drive")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--save", type=Path, help="folder for a checkpoint at the end")
    options = parser.parse_args()

    torch.manual_seed(0)
    with infinity.empty_init():  # the model never exists whole in memory
        model = Model(options.width, options.blocks)
    config = infinity.Config(
        precision="fp32",
        device={"budget": "8MiB"},  # much less than the model's state: so small only to show that it works
        host={"budget": "12MiB"},
        nvme={"paths": options.nvme or [tempfile.gettempdir()]},
    )
    text = torch.from_numpy(shipped_text().tokens.copy()).long()
    with infinity.offload(model, config) as engine:
        print(engine.report())
        optimizer = infinity.AdamW(model.parameters(), lr=3e-4, max_grad_norm=1.0)
        for step in range(options.steps):
            ids, targets = batch_of(text, step, size=4, length=64)
            loss = model(ids, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}: loss {loss.item():.4f}")
        if options.save is not None:
            engine.save(options.save, optimizer=optimizer)
        counters = engine.metrics()
        print(f"read {counters['nvme/read_bytes'] / 1e6:.0f} MB, wrote {counters['nvme/write_bytes'] / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
