"""Durable steps over ranks: a job that is killed between two ranks' commits, and one that goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import infinity
from tests.parity.loops import gathered_parameters
from tests.ranks.jobs import rank_and_size
from tests.ranks.training import make_config
from tests.zoo import Net, batch, build, loss_of

STEPS = 5
KILLED_AT = 3  # steps: that of the commit in which ranks die


def settings(stage: int, *, durable: bool = True) -> dict[str, Any]:
    chosen: dict[str, Any] = {"stage": stage, "host": {"budget": "1MiB"}, "schedule": "synchronous"}
    return chosen | ({"durability": "step"} if durable else {})


def train(engine: infinity.Engine, model: torch.nn.Module, optimizer: infinity.AdamW, start: int) -> list[float]:
    rank, size = rank_and_size()
    losses = []
    for step in range(start, STEPS):
        loss = loss_of(model, batch(step, shape=(4, 11)).chunk(size)[rank])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if engine.committed_step >= 0:
            engine.note({"next": step + 1})
    return losses


def train_until_killed(folder: Path, stage: int, points: tuple[str, str]) -> None:
    """Both ranks die in the commit of the same step, each at a point of its own."""
    rank, _ = rank_and_size()
    model = build(Net)
    engine = infinity.offload(model, make_config(folder / "run", settings(stage)))
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    committer = engine._runtime.committer
    assert committer is not None

    def die(point: str) -> None:
        is_last = committer.epoch == KILLED_AT  # the first commit, of what was offloaded, is epoch 1
        if is_last and point == points[rank]:
            os._exit(9)

    committer.store._on_commit_point = die
    train(engine, model, optimizer, 0)


def resume(folder: Path, stage: int) -> dict[str, Any]:
    """The rest of the run, and the whole of it without a break."""
    model = build(Net, seed=7)
    with infinity.offload(model, make_config(folder / "run", settings(stage)), resume=True) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=0.5)
        extra = engine.restore(optimizer=optimizer)
        first = engine.committed_step
        losses = train(engine, model, optimizer, extra["next"])
        parameters = gathered_parameters(model)
    whole = build(Net)
    with infinity.offload(whole, make_config(folder / "whole", settings(stage, durable=False))) as engine:
        expected = train(engine, whole, infinity.AdamW(whole.parameters(), lr=1e-2), 0)
        wanted: dict[str, Tensor] = gathered_parameters(whole)
    return {
        "first": first,
        "losses": losses,
        "expected": expected[first:],
        "differing": [name for name, value in parameters.items() if not torch.equal(value, wanted[name])],
    }
