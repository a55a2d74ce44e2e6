"""A run with everything that a checkpoint has to hold, stopped in the middle of a step, continued by another process.

    python -m tests.continuing FOLDER whole|first|rest

Two micro-batches a step, of which the first one's gradients wait when it is saved; two parameter groups, an LR
scheduler, a loss scaler with an overflow on the way, dropout, a buffer that every forward changes. `rest` builds
another model first.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.nn import functional

import infinity
from tests.conftest import small_config
from tests.resume import Remembering
from tests.zoo import Net, batch, build

STEPS, STOP = 5, 2  # it is stopped in the middle of step `STOP`, counted from 0
BUDGETS = {"swap files": "400KiB", "some of each": "900KiB", "host memory": "16MiB"}


@dataclass(frozen=True)
class Way:
    """One way to train; `spills` leaves the gradients that wait in the swap file."""

    precision: str
    place: str
    schedule: str
    device: str = "cpu"

    @property
    def name(self) -> str:
        return f"{self.precision}-{self.place}-{self.schedule}-{self.device}".replace(" ", "_")

    def settings(self) -> dict[str, Any]:
        given: dict[str, Any] = {"precision": self.precision, "schedule": self.schedule}
        if self.device == "fake":
            given["device"] = {"kind": "fake", "budget": "8MiB"}
        return given | {"host": {"budget": BUDGETS[self.place]}}


WAYS = [Way(*way) for way in product(("fp32", "bf16", "fp16"), BUDGETS, ("synchronous", "deferred"))]
WAYS += [Way(precision, place, "synchronous", "fake") for precision in ("fp32", "bf16", "fp16") for place in BUDGETS]


class Loop:
    """A training loop between whose micro-batches it can be saved."""

    def __init__(self, folder: Path, way: Way) -> None:
        self.model = build(Remembering)
        self.engine = infinity.offload(self.model, small_config(folder, **way.settings()))
        first, *rest = self.model.parameters()
        groups = [{"params": [first], "weight_decay": 0.0}, {"params": rest, "lr": 3e-3, "betas": (0.8, 0.95)}]
        self.optimizer = infinity.AdamW(groups, lr=1e-2, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=[1e-2, 3e-3], total_steps=STEPS)
        self.scaler = infinity.GradScaler(2.0**14, growth_interval=2)
        torch.manual_seed(7)

    def backward(self, step: int, part: int) -> float:
        ids = batch(2 * step + part)
        loss = functional.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten()) / 2
        factor = float("inf") if (step, part) == (1, 1) else 1.0  # this step is skipped
        self.scaler.scale(loss * factor).backward()
        return loss.item()

    def finish(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def train(self, start: int, stop: int, first_part: int = 0, last_part: int = 0) -> list[float]:
        """From part `first_part` of step `start` until before part `last_part` of step `stop`."""
        losses = []
        for step in range(start, stop + 1):
            for part in range(first_part if step == start else 0, last_part if step == stop else 2):
                losses.append(self.backward(step, part))
            if step < stop:
                self.finish()
        return losses

    def save(self, path: Path, **how: Any) -> None:
        self.engine.save(path, scheduler=self.scheduler, scaler=self.scaler, extra={"step": STOP}, **how)

    def load(self, path: Path) -> int:
        extra = self.engine.load(path, optimizer=self.optimizer, scheduler=self.scheduler, scaler=self.scaler)
        return int(extra["step"])

    def end(self) -> dict[str, Any]:
        """Close; what has to be equal."""
        state = self.optimizer.state_dict()["state"]
        found = {f"{n} {kind}": tensor for n, entry in state.items() for kind, tensor in entry.items()}
        with infinity.gathered(self.model):
            found |= {name: p.detach().float().clone() for name, p in self.model.named_parameters()}
        found |= {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.engine.close()
        digests = {n: xxhash.xxh3_64(t.contiguous().numpy().tobytes()).hexdigest() for n, t in found.items()}
        return {"digests": digests, "scale": self.scaler.get_scale(), "lr": self.scheduler.get_last_lr()}


def whole(folder: Path, way: Way) -> dict[str, Any]:
    loop = Loop(folder, way)
    return {"losses": loop.train(0, STEPS), **loop.end()}


def first(folder: Path, way: Way, *, behind: bool = False) -> dict[str, Any]:
    """Up to the middle of a step, and a checkpoint there; `behind` writes it while the step goes on."""
    loop = Loop(folder, way)
    losses = loop.train(0, STOP, last_part=1)
    loop.save(folder / way.name, wait=not behind)
    if behind:
        loop.train(STOP, STOP + 2, first_part=1)
    loop.engine.close()
    return {"losses": losses}


def rest(folder: Path, way: Way) -> dict[str, Any]:
    """Continue from there, behind another model that this process has trained first."""
    other = build(Net)
    with infinity.offload(other, small_config(folder, **way.settings() | {"precision": "fp32"})):
        optimizer = infinity.AdamW(other.parameters())
        functional.cross_entropy(other(batch(0)).flatten(0, 1), batch(0).flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        torch.rand(3)
        loop = Loop(folder, way)
        step = loop.load(folder / way.name)
        losses = loop.train(step, STEPS, first_part=1)
        return {"losses": losses, **loop.end()}


ACTS = {"whole": whole, "first": first, "rest": rest}


def main(folder: Path, act: str) -> None:
    torch.set_num_threads(1)
    print(json.dumps({way.name: ACTS[act](folder, way) for way in WAYS}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
