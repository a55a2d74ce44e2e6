"""Models that change after they were offloaded: frozen and unfrozen, edited unseen, called otherwise, given more.

Of PEER_DEEPSPEED section 4: number 10 (the same block called 1 to 5 times), number 18 (what is resized, replaced or
added late is told by name).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.data_edits import _weighted_sum, fingerprint
from tests.conftest import MakeEngine
from tests.parity.loops import Loop, assert_same, gathered_parameters, train_offloaded, train_plain
from tests.zoo import Net, batch, build, loss_of, one_step

SCHEDULES = ("overlapped", "synchronous", "deferred")


def _same(plain: nn.Module, ours: nn.Module) -> bool:
    found = gathered_parameters(ours)
    return all(torch.equal(value, found[name]) for name, value in plain.named_parameters())


# Freezing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("threshold", ["1KiB", "64MiB"], ids=["units", "resident"])
def test_freezing_and_unfreezing_between_steps(offload: MakeEngine, schedule: str, threshold: str) -> None:
    """A loop that freezes halves of the model in turn, as adversarial training does: state stays, nothing decays."""

    def run(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for step in range(6):
            model.blocks[step % 4].requires_grad_(False)
            model.head.weight.requires_grad = step % 2 == 0
            losses.append(one_step(model, optimizer, step))
            model.requires_grad_(True)
        return losses

    plain, ours = build(Net), build(Net)
    expected = run(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True))
    offload(ours, schedule=schedule, resident_threshold=threshold, host={"budget": "1MiB"})
    assert run(ours, infinity.AdamW(ours.parameters(), lr=1e-2, weight_decay=0.1)) == expected
    assert _same(plain, ours)


def test_a_frozen_step_writes_nothing(offload: MakeEngine) -> None:
    model: Any = build(Net)
    engine = offload(model, schedule="synchronous")
    optimizer = infinity.AdamW(model.parameters())
    one_step(model, optimizer, 0)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    one_step(model, optimizer, 1)
    before, after = engine.traffic.per_step
    assert after["nvme_write_bytes/param"] == 4 * 37 * 29 < before["nvme_write_bytes/param"]


@pytest.mark.parametrize("threshold", ["1KiB", "64MiB"], ids=["units", "resident"])
def test_what_was_frozen_when_offloaded_needs_a_place(offload: MakeEngine, threshold: str) -> None:
    model: Any = build(Net)
    model.head.requires_grad_(False)
    offload(model, resident_threshold=threshold, host={"budget": "1MiB"})
    model.head.requires_grad_(True)
    assert model.head.weight.requires_grad
    for _ in range(2):
        with pytest.raises(infinity.UnsupportedModelError, match=r"'head\.weight' was frozen when.*engine\.adopt"):
            model(batch(0))
    model.head.weight.requires_grad = False
    assert not model.head.weight.requires_grad
    model(batch(0))


# Edits that torch does not count -----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_edits_through_data_in_gathered(offload: MakeEngine, schedule: str) -> None:
    def run(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for step in range(3):
            losses.append(one_step(model, optimizer, step))
            with infinity.gathered(model.blocks) if isinstance(optimizer, infinity.AdamW) else torch.no_grad():
                model.blocks[step].up.weight.data.mul_(0.5)
                model.blocks[1].down.weight.data[3] = 0.25
        return losses

    plain, ours = build(Net), build(Net)
    expected = run(plain, torch.optim.AdamW(plain.parameters(), fused=True))
    offload(ours, schedule=schedule)
    assert run(ours, infinity.AdamW(ours.parameters())) == expected
    assert _same(plain, ours)


@pytest.mark.parametrize("schedule", ["synchronous", "deferred"])
def test_edits_through_data_of_resident_parameters(offload: MakeEngine, schedule: str) -> None:
    """They are always there, so they are edited without `gathered()`; a tensor taken once may edit them for good."""

    def run(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        taken = model.head.weight.data
        losses = []
        for step in range(4):
            losses.append(one_step(model, optimizer, step))
            taken.mul_(0.5)
        return losses

    plain, ours = build(Net), build(Net)
    expected = run(plain, torch.optim.AdamW(plain.parameters(), fused=True))
    offload(ours, schedule=schedule, resident_threshold="64MiB", host={"budget": "1MiB"})
    assert run(ours, infinity.AdamW(ours.parameters())) == expected
    assert _same(plain, ours)


def test_reading_data_writes_nothing(offload: MakeEngine) -> None:
    model: Any = build(Net)
    engine = offload(model)
    before = engine.metrics()["nvme/write_operations"]
    with infinity.gathered(model.head):
        assert model.head.weight.data.sum() == model.head.weight.sum()
    assert engine.metrics()["nvme/write_operations"] == before


def test_an_edit_through_data_in_a_forward_is_refused(offload: MakeEngine) -> None:
    def clamp(module: nn.Linear, args: Any) -> None:
        module.weight.data.clamp_(-0.01, 0.01)

    model: Any = build(Net)
    offload(model)
    handle = model.blocks[1].up.register_forward_pre_hook(clamp)
    with pytest.raises(infinity.UnsupportedModelError, match=r"blocks.1.*in place.*gathered"):
        model(batch(0))
    handle.remove()
    with torch.no_grad():
        assert torch.equal(model(batch(0)), build(Net)(batch(0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("of", [fingerprint, _weighted_sum])
def test_fingerprints_tell_every_change(of: Callable[[Tensor], int], dtype: torch.dtype) -> None:
    values = torch.arange(300_000).remainder(101).to(dtype)
    before = of(values)
    assert of(values.clone()) == before
    seen = {before}
    for change in (
        lambda v: v[0].add_(1),
        lambda v: v[-1].add_(1),
        lambda v: v[[5, 270_000]].copy_(v[[270_000, 5]]),
        lambda v: v.copy_(v.flip(0)),
        lambda v: v.zero_(),
    ):
        changed = values.clone()
        change(changed)
        if not torch.equal(changed, values):
            seen.add(of(changed))
    assert len(seen) == 5
    assert of(values[:0]) == 0


# Repetitions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [None, "nr", "re"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_unit_that_runs_again_at_once_is_read_once(
    offload: MakeEngine, schedule: str, checkpointing: str | None
) -> None:
    """Once it is known that units repeat, three runs of each move what one run does."""
    moved = {}
    for repeat in (1, 3):
        loop = Loop(lambda repeat=repeat: Net(repeat=repeat, checkpointing=checkpointing), steps=3)
        plain = train_plain(loop)
        ours, engine = train_offloaded(loop, lambda model: offload(model, schedule=schedule))
        assert_same(plain, ours)
        last = engine.traffic.per_step[-1]
        moved[repeat] = (last["nvme_read_bytes/param"], last["h2d_bytes"])
        assert engine.metrics()["device/peak_bytes"] <= engine.plan.placement.device_minimum_nbytes
    assert moved[3] == moved[1]


def test_a_unit_that_repeats_makes_way_for_others(offload: MakeEngine) -> None:
    """One unit at a time, and none beyond the forward or the backward."""
    model: Any = build(lambda: Net(repeat=2))
    engine = offload(model)
    gatherer = engine._runtime.gatherer
    at_once: list[int] = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: at_once.append(len(gatherer.gathered())))
    for step in range(2):
        loss = loss_of(model, batch(step))
        assert not gatherer.gathered()
        loss.backward()  # type: ignore[no-untyped-call]
        assert not gatherer.gathered()
    model.repeat = 1
    with torch.no_grad():
        model(batch(0))
    assert max(at_once) == 1
    assert not gatherer.gathered()


# Parameters that came later ----------------------------------------------------------------------------------------


def _replace_head(model: Any) -> None:
    model.head = nn.Linear(37, 29, bias=False)


def _add_block(model: Any) -> None:
    model.blocks.append(nn.Linear(37, 37))


def _add_parameter(model: Any) -> None:
    model.blocks[2].up.register_parameter("scale", nn.Parameter(torch.ones(3)))


@pytest.mark.parametrize(
    ("change", "name"),
    [(_replace_head, "head.weight"), (_add_block, "blocks.4.weight"), (_add_parameter, "blocks.2.up.scale")],
)
def test_what_came_later_is_named(offload: MakeEngine, change: Callable[[Any], None], name: str) -> None:
    """It would compute, and no step would ever train it."""
    model: Any = build(Net)
    offload(model)
    optimizer = infinity.AdamW(model.parameters())
    one_step(model, optimizer, 0)
    change(model)
    for _ in range(2):
        with pytest.raises(infinity.UnsupportedModelError, match=f"got parameters since.*{name!r}"):
            model(batch(1))


def test_what_is_resized_in_its_place_is_named(offload: MakeEngine) -> None:
    model: Any = build(Net)
    offload(model)
    model.embed.weight = nn.Parameter(torch.zeros(40, 37))
    with pytest.raises(infinity.UnsupportedModelError, match=r"put in the place.*'embed.weight'"):
        model(batch(0))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_modules_without_parameters_removed_and_moved_ones_train_on(offload: MakeEngine, schedule: str) -> None:
    def run(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = [one_step(model, optimizer, 0)]
        model.extra = nn.Sequential(nn.Dropout(), nn.ReLU())
        losses.append(one_step(model, optimizer, 1))
        del model.blocks[1]
        losses.append(one_step(model, optimizer, 2))
        model.blocks = nn.ModuleList(reversed(list(model.blocks)))
        losses.append(one_step(model, optimizer, 3))
        return [*losses, one_step(model, optimizer, 4)]

    plain, ours = build(Net), build(Net)
    expected = run(plain, torch.optim.AdamW(plain.parameters(), fused=True))
    offload(ours, schedule=schedule)
    assert run(ours, infinity.AdamW(ours.parameters())) == expected
    assert _same(plain, ours)
