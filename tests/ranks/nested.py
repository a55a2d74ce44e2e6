"""A model with another engine's model inside, trained by ranks and by one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from tests.parity.loops import gathered_parameters
from tests.parity.test_engines_nested import HYPER, Outer
from tests.ranks.training import ROWS, STEPS, Outcome, make_config
from tests.zoo import batch, build, loss_of

# Schedule and stage of the inner and of the outer engine, and checkpointing around both.
CASES: tuple[tuple[dict[str, Any], dict[str, Any], str | None], ...] = (
    ({"schedule": "overlapped"}, {"schedule": "deferred"}, None),
    ({"stage": 1}, {"schedule": "synchronous"}, "re"),
    ({"schedule": "deferred"}, {"stage": 2}, "span"),
)


def make(checkpointing: str | None) -> Outer:
    """Without the norm over the batch, of which a rank sees a part."""
    model = Outer(checkpointing=checkpointing)
    model.inner.norm = nn.Identity()  # type: ignore[assignment]
    return model


def train_two_engines(folder: Path) -> list[Outcome]:
    """The share of this rank of every case."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    outcomes = []
    for inner_settings, outer_settings, checkpointing in CASES:
        model = build(lambda how=checkpointing: make(how), seed=rank)  # type: ignore[misc]
        outcome = Outcome([], [], {})
        with (
            infinity.offload(model.inner, make_config(folder, inner_settings)) as inner,  # type: ignore[arg-type]
            infinity.offload(model, make_config(folder, outer_settings)) as outer,
        ):
            optimizers = [infinity.AdamW(engine.parameters(), **HYPER) for engine in (inner, outer)]
            for step in range(STEPS):
                loss = loss_of(model, batch(step, shape=(ROWS, 11)).chunk(size)[rank])
                loss.backward()  # type: ignore[no-untyped-call]
                outcome.losses.append(loss.item())
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            outcome.parameters = gathered_parameters(model)
        outcomes.append(outcome)
    return outcomes


def train_whole(checkpointing: str | None) -> Outcome:
    """The case in plain PyTorch on whole batches."""
    model = build(lambda: make(checkpointing))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)
    outcome = Outcome([], [], {})
    for step in range(STEPS):
        loss = loss_of(model, batch(step, shape=(ROWS, 11)))
        loss.backward()  # type: ignore[no-untyped-call]
        outcome.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    outcome.parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return outcome
