"""Reads run ahead of the training thread once the order is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import infinity
from tests.conftest import MakeEngine
from tests.parity.loops import Loop, assert_same, smallest_budget, train_offloaded, train_plain
from tests.zoo import Net, batch, build, loss_of


@pytest.mark.parametrize("schedule", ["overlapped", "synchronous", "deferred"])
@pytest.mark.parametrize("checkpointing", [None, "nr"])
def test_reads_are_ahead_from_the_second_step(offload: MakeEngine, schedule: str, checkpointing: str | None) -> None:
    model = build(lambda: Net(blocks=6, checkpointing=checkpointing))
    engine = offload(model, schedule=schedule, host={"budget": "480KiB"})
    placement = engine.plan.placement
    assert placement.window_nbytes >= 2 * 32768
    assert len(placement.pinned_params) < engine.plan.units
    optimizer = infinity.AdamW(model.parameters())

    def reads() -> tuple[float, float]:
        metrics = engine.metrics()
        return metrics["readahead/reads_ahead"], metrics["readahead/reads_on_demand"]

    ahead, on_demand = 0.0, 0.0
    for step in range(8):
        if step == 1:
            ahead, on_demand = reads()
        loss_of(model, batch(step)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    more_ahead, more_on_demand = reads()
    ahead, on_demand = more_ahead - ahead, more_on_demand - on_demand
    assert ahead >= 7
    assert on_demand <= 0.05 * (ahead + on_demand)
    metrics = engine.metrics()
    assert metrics["order/misses"] == 0


class Alternating(nn.Module):
    """Two large layers that take turns in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(120, 120)
        self.second = nn.Linear(120, 120)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.first, self.second):
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("schedule", ["overlapped", "synchronous", "deferred"])
def test_units_that_take_turns_are_read_for_every_use(offload: MakeEngine, schedule: str) -> None:
    """Each of them twice in a forward and twice in a backward, and every read is foreseen from the second step on."""
    loop = Loop(Alternating, loss=lambda m, x: m(x).square().mean(), batch=lambda n: torch.randn(3, 120), steps=4)
    minimum = smallest_budget(offload, "host", build(Alternating), schedule=schedule)
    ours, engine = train_offloaded(loop, lambda model: offload(model, schedule=schedule, host={"budget": minimum}))
    assert_same(train_plain(loop), ours)
    placement = engine.plan.placement
    assert not placement.keep_at_turn | placement.keep_at_boundary | placement.pinned_params
    shards = 2 * (120 * 120 + 120) * 4
    # A deferred update is made where the forward reads first, an overlapped one where the backward has read last.
    updates = 1 if schedule == "synchronous" else 0
    reads = [step["nvme_read_bytes/param"] for step in engine.traffic.per_step]
    assert reads[2:] == [(4 + updates) * shards] * 2
    assert engine.metrics()["order/misses"] <= 4
