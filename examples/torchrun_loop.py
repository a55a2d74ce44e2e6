"""Several ranks share the state (ZeRO stage 3); each reads and writes its own part.

torchrun --nproc-per-node 2 examples/torchrun_loop.py --stage 3
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
from torch import nn

import infinity
from infinity.data.text import shipped_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, default=Path(tempfile.gettempdir()), help="folder for swap files")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    options = parser.parse_args()
    rank, n_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    torch.manual_seed(0)  # ranks build the same model
    width = 128
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(6)]
    model = nn.Sequential(nn.Embedding(256, width), *blocks, nn.Linear(width, 256))
    config = infinity.Config(
        precision="fp32",
        stage=options.stage,
        device={"budget": "8MiB"},
        host={"budget": "12MiB"},
        nvme={"paths": [options.nvme]},
    )
    text = torch.from_numpy(shipped_text().tokens.copy()).long()
    with infinity.offload(model, config) as engine:  # sets up gloo or NCCL from torchrun's environment
        optimizer = infinity.AdamW(model.parameters(), lr=3e-4, max_grad_norm=1.0)
        for step in range(options.steps):
            start = (step * n_ranks + rank) * 256  # each rank its own part of the text
            ids, targets = text[start : start + 256], text[start + 1 : start + 257]
            loss = nn.functional.cross_entropy(model(ids), targets)
            loss.backward()  # gradients are averaged over the ranks
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"step {step}: loss {loss.item():.4f} on rank 0, gradient norm {optimizer.last_grad_norm:.4f}")
        counters = engine.metrics()
        print(f"rank {rank}: read {counters['nvme/read_bytes'] / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
