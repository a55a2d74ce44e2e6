"""Reads run ahead of the training thread once the order is known."""

from __future__ import annotations

import pytest

import infinity
from tests.conftest import MakeEngine
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
