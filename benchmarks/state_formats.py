"""Losses of a small real training run with AdamW's moments in fp32, bf16 and int8.

    python benchmarks/state_formats.py [--steps 300] [--lr 1e-3] [--json FILE]

The same first values and batches of real text for every format, in bf16, with everything in host memory: where it lies
does not change a bit. What is compared is the mean loss over windows of 20 steps: the relative difference of every
window to that with fp32 moments. The losses are reproducible bit for bit, so one run of each is enough.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

import infinity
from infinity.bench.arguments import at_least, result_file
from infinity.bench.machine import describe_machine
from infinity.data.batches import Batches
from infinity.data.text import shipped_text
from infinity.models.gpt import Gpt, GptShape, init_weights

FORMATS = ("fp32", "bf16", "int8")
SHAPE = GptShape(layers=2, hidden=64, heads=2, seq=32)
_WINDOW = 20


def window_losses(state_format: str, steps: int, lr: float) -> torch.Tensor:
    """Mean losses of consecutive windows of a run."""
    with infinity.empty_init():
        model = Gpt(SHAPE)
    torch.manual_seed(0)
    memory: dict[str, Any] = {"host": {"budget": "64MiB"}, "device": {"kind": "cpu", "budget": "64MiB"}}
    config = infinity.Config(precision="bf16", state_format=state_format, schedule="overlapped", **memory)
    batches = Batches(shipped_text(), batch=8, seq=SHAPE.seq, seed=0)
    losses = []
    with infinity.offload(model, config, init_fn=init_weights):
        optimizer = infinity.AdamW(model.parameters(), lr=lr)
        for step in range(steps):
            loss = model(*batches.at(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return torch.tensor(losses[: steps - steps % _WINDOW]).view(-1, _WINDOW).mean(dim=1)


def compare(steps: int = 300, lr: float = 1e-3) -> dict[str, dict[str, Any]]:
    """By format: the loss of every window, and how far it is from that with fp32 moments."""
    curves = {state_format: window_losses(state_format, steps, lr) for state_format in FORMATS}
    found = {}
    for state_format, curve in curves.items():
        difference = (curve - curves["fp32"]) / curves["fp32"]
        found[state_format] = {
            "first_loss": float(curve[0]),
            "last_loss": float(curve[-1]),
            "last_difference": float(difference[-1]),
            "largest_difference": float(difference.abs().max()),
            "losses": curve.tolist(),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=at_least(_WINDOW), default=300)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--json", type=result_file)
    options = parser.parse_args()
    found = compare(options.steps, options.lr)
    report = {"machine": describe_machine(), "steps": options.steps, "lr": options.lr, "found": found}
    print(json.dumps(report, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
