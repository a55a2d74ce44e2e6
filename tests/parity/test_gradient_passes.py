"""Norms and overflows are measured as gradients arrive: how often a gradient is read for it, and when."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import infinity
from tests.conftest import MakeEngine
from tests.parity.loops import Loop, assert_parity
from tests.zoo import Net, batch, build, loss_of


def passes(engine: infinity.Engine) -> int:
    return engine._runtime.sink.n_passes


def backwards(model: nn.Module, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        loss_of(model, batch(number)).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("schedule", ["synchronous", "deferred"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_clipping_reads_every_gradient_once_and_not_in_step(
    offload: MakeEngine, schedule: str, micro_batches: int
) -> None:
    model = build(Net)
    engine = offload(model, schedule=schedule, host={"budget": "4MiB"})
    assert not engine.plan.placement.spilled_gradients
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1)
    slots = sum(len(group.layout.slots) for group in engine._runtime.groups if group.trainable)
    for step in range(3):
        before = passes(engine)
        backwards(model, micro_batches)
        arrived = passes(engine)
        optimizer.step()
        optimizer.zero_grad()
        assert passes(engine) == arrived  # the step reads no gradient to measure it
        # How many backwards come before a step is known from the step before.
        expected = micro_batches if step == 0 else 1
        assert arrived - before == expected * slots


def test_fewer_backwards_than_before_are_measured_in_the_step(offload: MakeEngine) -> None:
    model = build(Net)
    engine = offload(model, schedule="synchronous", host={"budget": "4MiB"})
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1)
    slots = sum(len(group.layout.slots) for group in engine._runtime.groups if group.trainable)
    for count in (3, 1, 1, 3):
        before = passes(engine)
        backwards(model, count)
        optimizer.step()
        optimizer.zero_grad()
        assert passes(engine) - before == (3 if count == 3 else 1) * slots


def test_a_gradient_that_arrives_in_parts_is_read_once(offload: MakeEngine) -> None:
    model = build(lambda: Net(tied=True))
    engine = offload(model, schedule="synchronous", host={"budget": "4MiB"})
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1)
    slots = sum(len(group.layout.slots) for group in engine._runtime.groups if group.trainable)
    for step in range(1, 4):
        backwards(model, 1)
        optimizer.step()
        optimizer.zero_grad()
        assert passes(engine) == step * slots


def test_without_clipping_nothing_is_measured(offload: MakeEngine) -> None:
    model = build(Net)
    engine = offload(model, schedule="synchronous")
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    backwards(model, 1)
    optimizer.step()
    assert passes(engine) == 0


def test_a_loss_scale_is_watched_as_gradients_arrive(offload: MakeEngine) -> None:
    model = build(Net)
    engine = offload(model, precision="fp16", schedule="synchronous", host={"budget": "4MiB"})
    optimizer, scaler = infinity.AdamW(model.parameters(), lr=1e-2), infinity.GradScaler(init_scale=1024.0)
    slots = sum(len(group.layout.slots) for group in engine._runtime.groups if group.trainable)
    scaler.scale(loss_of(model, batch(0))).backward()
    assert passes(engine) == slots
    scaler.step(optimizer)
    scaler.update()
    assert passes(engine) == slots


@pytest.mark.parametrize("accumulate", [(1,), (3, 1), (1, 2)])
def test_same_norms(offload: MakeEngine, accumulate: tuple[int, ...]) -> None:
    loop = Loop(Net, accumulate=accumulate, max_norm=0.1)
    assert_parity(loop, offload, clip_in_optimizer=True, schedule="synchronous", host={"budget": "4MiB"})


def test_a_gradient_that_is_changed_is_measured_again(offload: MakeEngine) -> None:
    model = build(Net)
    engine = offload(model, schedule="synchronous", host={"budget": "4MiB"})
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1e9)
    backwards(model, 1)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2)
    optimizer.step()
    other = build(Net)
    backwards(other, 1)
    doubled = [p.grad * 2 for p in other.parameters() if p.grad is not None]
    expected = torch.nn.utils.get_total_norm(doubled)
    assert engine.plan.parameters
    assert optimizer.last_grad_norm is not None
    assert torch.equal(optimizer.last_grad_norm, expected)
