"""A training run that can be stopped and continued, also as a process of its own: `python -m tests.resume`."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional

import infinity
from tests.conftest import small_config
from tests.parity.loops import gathered_parameters
from tests.zoo import Net, batch, build

CASES = [(precision, schedule) for precision in ("fp32", "bf16") for schedule in ("synchronous", "overlapped")]


class Remembering(Net):
    """A net whose result depends on dropout and on a buffer that every forward changes."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.register_buffer("average", torch.zeros(29))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        out = super().forward(ids)
        with torch.no_grad():
            self.average.lerp_(out.float().mean((0, 1)), 0.1)
        return out + self.average


class Run:
    """Model, engine, optimizer and schedule of one run."""

    def __init__(self, engine_of: Any, make: Any = Remembering, **hyper: Any) -> None:
        self.model: nn.Module = build(make)
        self.engine: infinity.Engine = engine_of(self.model)
        self.optimizer = infinity.AdamW(self.model.parameters(), **({"lr": 1e-2, "weight_decay": 0.1} | hyper))
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4, 5], gamma=0.5)
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)

    def train(self, start: int, stop: int) -> list[float]:
        """The losses of steps `start` to `stop`; every generator has a say in them."""
        losses = []
        for step in range(start, stop):
            ids = batch(step)
            scale = 1 + random.random() + float(np.random.rand())
            loss = scale * functional.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, path: Path) -> None:
        self.engine.save(path, optimizer=self.optimizer, extra={"scheduler": self.scheduler.state_dict()})

    def load(self, path: Path) -> None:
        extra = self.engine.load(path, optimizer=self.optimizer)
        self.scheduler.load_state_dict(extra["scheduler"])

    def parameters(self) -> dict[str, Tensor]:
        return gathered_parameters(self.model)

    def summary(self) -> dict[str, Any]:
        """What has to be the same after a resume, as JSON."""
        tensors = [*self.parameters().items(), *self.model.named_buffers()]
        state = self.optimizer.state_dict()["state"]
        tensors += [(f"{name} of {number}", t) for number, entry in state.items() for name, t in entry.items()]
        digests = {name: xxhash.xxh3_64(t.detach().float().numpy().tobytes()).hexdigest() for name, t in tensors}
        return {"digests": digests, "lr": self.scheduler.get_last_lr(), "next": [random.random(), torch.rand(1).item()]}


def main(folder: Path, start: int, stop: int) -> None:
    """Train from step `start` to `stop` in every case; continue what `folder` holds, and leave a checkpoint there."""
    torch.set_num_threads(1)
    found = {}
    for precision, schedule in CASES:
        config = small_config(folder, precision=precision, schedule=schedule, host={"budget": "300KiB"})
        run = Run(lambda model, config=config: infinity.offload(model, config))
        checkpoint = folder / f"{precision}-{schedule}"
        if start:
            run.load(checkpoint)
        losses = run.train(start, stop)
        run.save(checkpoint)
        found[f"{precision}-{schedule}"] = {"losses": losses, **run.summary()}
        run.engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
