"""Hugging Face models, as they are, train as in plain PyTorch, bit for bit.

Of the bugs that users of the leading engine met, here are: gradient checkpointing of both kinds with models that
transformers builds (DeepSpeed #8130, #8148, transformers #47254), and `generate` between steps (#5828, #2006).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.conftest import MakeEngine
from tests.parity.loops import (
    Loop,
    Outcome,
    assert_same,
    gathered_parameters,
    smallest_budget,
    train_offloaded,
    train_plain,
)
from tests.zoo import build

pytest.importorskip("transformers", reason="the Hugging Face tests need the extra 'hf'")
from tests.parity.hf_models import BLOCKS, MODELS, checkpointed, hf_loss, token_batch

SCHEDULES = ("overlapped", "synchronous", "deferred")
CHECKPOINTING: dict[str, Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]] = {
    "plain": lambda make: lambda: make().train(),
    "checkpointed": partial(checkpointed, use_reentrant=False),
    "reentrant": partial(checkpointed, use_reentrant=True),
}


# The name that users have; newer versions prefer another one.
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")


def _loop(make: Callable[[], nn.Module]) -> Loop:
    return Loop(make, loss=hf_loss, batch=token_batch, steps=3)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("name", MODELS)
def test_training(offload: MakeEngine, name: str, checkpointing: str, schedule: str) -> None:
    loop = _loop(CHECKPOINTING[checkpointing](MODELS[name]))
    plain = train_plain(loop)
    ours, engine = train_offloaded(loop, lambda model: offload(model, schedule=schedule))
    assert_same(plain, ours)
    units = [unit.name for unit in engine._runtime.units]
    for prefix in BLOCKS[name]:
        container = engine._runtime.model.get_submodule(prefix)
        assert isinstance(container, nn.ModuleList)
        assert [unit for unit in units if unit.startswith(prefix + ".")] == [
            f"{prefix}.{n}" for n in range(len(container))
        ]


@pytest.mark.somewhere
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_smallest_host_budget(offload: MakeEngine, name: str, schedule: str) -> None:
    make = MODELS[name]
    budget = smallest_budget(offload, "host", build(make), schedule=schedule)
    loop = _loop(lambda: make().train())
    plain = train_plain(loop)
    ours, engine = train_offloaded(loop, lambda model: offload(model, schedule=schedule, host={"budget": budget}))
    assert_same(plain, ours)
    assert engine.metrics()["host/peak_bytes"] <= budget


def _train_and_generate(model: Any, optimizer: torch.optim.Optimizer) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of a few steps and what the model generated between them."""
    losses, generated = [], []
    for step in range(3):
        model.train()
        loss = hf_loss(model, token_batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        model.eval()
        options = {"max_new_tokens": 4, "do_sample": False}
        generated.append(model.generate(token_batch(50 + step, (2, 5)), **options))
        generated.append(model.generate(token_batch(60 + step, (2, 5)), num_beams=2, **options))
    return losses, generated


@pytest.mark.somewhere
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "t5"])
def test_generation_between_steps(offload: MakeEngine, name: str, schedule: str) -> None:
    plain = build(MODELS[name])
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    losses, generated = _train_and_generate(plain, reference)
    expected = Outcome(losses, [], {n: p.detach().clone() for n, p in plain.named_parameters()})
    model = build(MODELS[name])
    engine = offload(model, schedule=schedule)
    losses, ours = _train_and_generate(model, infinity.AdamW(model.parameters(), lr=1e-2))
    assert_same(expected, Outcome(losses, [], gathered_parameters(model)))
    assert all(map(torch.equal, generated, ours))
    before = engine.traffic.total["nvme_write_bytes"]
    model.generate(token_batch(99, (2, 5)), max_new_tokens=3)  # type: ignore[operator]
    assert engine.traffic.total["nvme_write_bytes"] == before
