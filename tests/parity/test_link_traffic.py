"""What crosses between host and device in a step: closed forms, on every schedule."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import infinity
from infinity.gradients import GRAD_DTYPE
from tests.conftest import MakeEngine
from tests.parity.loops import Loop, train_offloaded
from tests.zoo import Frozen, Net

CASES = [("overlapped", 1), ("synchronous", 1), ("synchronous", 3), ("deferred", 1), ("deferred", 3)]


def check(engine: infinity.Engine, micro_batches: int) -> None:
    """Every micro-batch brings each streamed shard twice; an update brings what stays on the device once.

    A gradient leaves the device once per micro-batch, without padding.
    """
    runtime = engine._runtime
    resident = {group.index for group in runtime.resident_groups}
    assert len(resident) < len(runtime.groups)
    up = down = 0
    for group in runtime.groups:
        is_resident = group.index in resident
        times = int(group.trainable) if is_resident else 2 * micro_batches * engine.plan.placement.uses[group.index]
        up += group.shard_nbytes * times
        down += micro_batches * group.layout.payload_numel * GRAD_DTYPE.itemsize * int(group.trainable)
    crossed = [(step["h2d_bytes"], step["d2h_bytes"]) for step in engine.traffic.per_step]
    assert crossed == [(up, down)] * len(crossed)


@pytest.mark.parametrize(("schedule", "micro_batches"), CASES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [Net, Frozen], ids=["all train", "some frozen"])
def test_every_byte_crosses_as_often_as_it_must(
    offload: MakeEngine, make: Any, precision: str, schedule: str, micro_batches: int
) -> None:
    loop = Loop(make, steps=3, accumulate=(micro_batches,))
    _, engine = train_offloaded(loop, lambda model: offload(model, schedule=schedule, precision=precision))
    check(engine, micro_batches)


@pytest.mark.parametrize("schedule", ["overlapped", "synchronous", "deferred"])
def test_slices_of_the_batch_cross_as_one(offload: MakeEngine, schedule: str) -> None:
    loop = Loop(Net, steps=3)
    _, engine = train_offloaded(loop, lambda model: offload(model, schedule=schedule, micro_batches=2))
    check(engine, 1)


@pytest.mark.parametrize("by", ["torch", "engine"])
def test_recomputation_brings_nothing_again(offload: MakeEngine, by: str) -> None:
    """A forward that runs again inside the backward finds what the backward has gathered."""
    loop = Loop(partial(Net, checkpointing="nr") if by == "torch" else Net, steps=3)
    policy = "recompute" if by == "engine" else "none"
    _, engine = train_offloaded(
        loop, lambda model: offload(model, schedule="overlapped", activations={"policy": policy})
    )
    check(engine, 1)
