"""Updates that `overlapped` leaves for the next forward: the same bits and bytes, whoever looks in between."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.config import Schedule
from infinity.demand import Request
from infinity.placement import make_placement
from infinity.sizes import parse_nbytes
from tests.conftest import MakeEngine
from tests.mechanics.test_iterations import nothing_gathered
from tests.parity.loops import Loop, assert_parity, gathered_parameters, smallest_budget
from tests.zoo import Net, batch, build, loss_of, one_step

DEEP = partial(Net, blocks=12)
LOOP = Loop(DEEP, steps=4)
SETTINGS: dict[str, Any] = {"schedule": "overlapped", "chunk": "16KiB"}
STEP_NBYTES = 24 << 10


def left(engine: infinity.Engine) -> frozenset[int]:
    return engine.plan.placement.updated_in_forward


def budget_that_leaves(offload: MakeEngine, make: Any = DEEP, **settings: Any) -> int:
    """A host budget with which some updates wait for the next forward; found without an engine for every try."""
    with offload(build(make), **settings) as engine:
        runtime = engine._runtime
        request = Request(
            units=runtime.units,
            groups=runtime.groups,
            fields=runtime.kernel.fields,
            schedule=Schedule.OVERLAPPED,
            schedule_reason="",
            host_budget_nbytes=0,
            device_budget_nbytes=1 << 40,
            nvme_budget_nbytes=None,
            chunk_nbytes=parse_nbytes(settings["chunk"]),
            staging_nbytes=0,
        )
        least = runtime.placement.host_minimum_nbytes
        for budget in range(least, 10 * least, STEP_NBYTES):
            if make_placement(replace(request, host_budget_nbytes=budget)).updated_in_forward:
                return budget
    raise AssertionError("no budget leaves an update for the next forward")


def waiting(engine: infinity.Engine) -> set[int]:
    """Groups whose updates have not started, as the I/O loop has heard."""
    found: set[int] = set()

    async def look() -> None:
        found.update(engine._runtime.read_ahead._deferred)

    engine._runtime.io.submit(look(), "look").wait(100)
    return found


@pytest.fixture
def pair(offload: MakeEngine) -> Any:
    """A plain model and an offloaded one with the same values, and their optimizers."""

    def make(model: Any = DEEP, **settings: Any) -> Any:
        given = SETTINGS | settings
        plain, ours = build(model), build(model)
        engine = offload(ours, host={"budget": budget_that_leaves(offload, model, **given)}, **given)
        assert left(engine)
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        return plain, ours, theirs, infinity.AdamW(ours.parameters(), lr=1e-2), engine

    return make


def assert_equal(plain: nn.Module, ours: nn.Module) -> None:
    found = gathered_parameters(ours)
    assert all(torch.equal(found[name], value) for name, value in plain.named_parameters())


@pytest.mark.parametrize("drives", [1, 2])
@pytest.mark.parametrize("chunk", ["4KiB", "16KiB", "1MiB"])
def test_same_bits_and_closed_forms(offload: MakeEngine, tmp_path: Path, drives: int, chunk: str) -> None:
    nvme = {"paths": [tmp_path / str(number) for number in range(drives)]}
    settings = SETTINGS | {"chunk": chunk, "nvme": nvme}
    host = {"budget": budget_that_leaves(offload, **settings)}
    assert_parity(LOOP, offload, host=host, **settings)


@pytest.mark.parametrize("state_format", ["fp32", "bf16", "int8"])
def test_in_bf16_the_bits_are_those_of_the_synchronous_schedule(offload: MakeEngine, state_format: str) -> None:
    settings: dict[str, Any] = SETTINGS | {"precision": "bf16", "state_format": state_format}
    budget, runs = budget_that_leaves(offload, **settings), []
    for schedule in ("overlapped", "synchronous"):
        model = build(DEEP)
        with offload(model, host={"budget": budget}, **settings | {"schedule": schedule}):
            optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
            runs.append(([one_step(model, optimizer, number) for number in range(4)], gathered_parameters(model)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], value) for name, value in runs[1][1].items())


@pytest.mark.parametrize("checkpointing", ["nr", "re", "span"])
def test_with_recomputation(offload: MakeEngine, checkpointing: str) -> None:
    make = partial(DEEP, checkpointing=checkpointing)
    budget = budget_that_leaves(offload, make, **SETTINGS)
    assert_parity(Loop(make, steps=3), offload, host={"budget": budget}, **SETTINGS)


def test_they_wait_in_step_and_run_in_the_forward(pair: Any) -> None:
    _, ours, _, optimizer, engine = pair()
    told = next(term.why for term in engine.plan.placement.host if term.name == "gradients")
    assert told.endswith(f"{len(left(engine))} of them until the next forward")
    loss_of(ours, batch(0)).backward()
    assert left(engine) <= waiting(engine)
    done = [update.computed.done for update in engine._runtime.in_flight if update.state.group.index in left(engine)]
    assert done == [False] * len(left(engine))
    optimizer.step()
    others = [update for update in engine._runtime.in_flight if update.state.group.index not in left(engine)]
    assert all(update.computed.done for update in others)
    optimizer.zero_grad()
    loss_of(ours, batch(1))
    assert not waiting(engine)


def test_evaluation_between_steps(pair: Any) -> None:
    plain, ours, theirs, mine, engine = pair()
    for number in range(3):
        assert one_step(plain, theirs, number) == one_step(ours, mine, number)
        with torch.no_grad():
            assert torch.equal(plain(batch(50 + number)), ours(batch(50 + number)))
    assert_equal(plain, ours)
    nothing_gathered(engine)


def test_what_is_gathered_around_the_step_has_new_values(pair: Any) -> None:
    plain, ours, theirs, mine, engine = pair()
    index = min(left(engine))
    name = next(name for name, module in ours.named_modules() if module is engine._runtime.units[index].module)
    for number in range(3):
        expected = one_step(plain, theirs, number)
        with infinity.gathered(ours.get_submodule(name)):
            assert one_step(ours, mine, number) == expected
            for key, parameter in ours.get_submodule(name).named_parameters():
                assert torch.equal(parameter, plain.get_submodule(name).get_parameter(key))
    assert_equal(plain, ours)


def test_looking_in_the_middle_of_a_step_runs_the_update(pair: Any) -> None:
    """As with every other group: its gradient is used up, so what is seen is new."""
    plain, ours, theirs, mine, engine = pair()
    index = min(left(engine))
    group = engine._runtime.groups[index]
    loss_of(plain, batch(0)).backward()
    theirs.step()
    loss_of(ours, batch(0)).backward()
    with infinity.gathered(list(group.parameters)):
        for slot, parameter in zip(group.layout.slots, group.parameters, strict=True):
            assert torch.equal(parameter, plain.get_parameter(slot.name))
    mine.step()
    assert_equal(plain, ours)


class Sparse(Net):
    """Leaves out every fourth block, others every time."""

    def __init__(self) -> None:
        super().__init__(blocks=12)
        self.calls = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            if number % 4 != self.calls % 4:
                x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def test_units_that_a_forward_skips(pair: Any) -> None:
    """Their updates of before keep waiting, or run when somebody looks."""
    plain, ours, theirs, mine, engine = pair(Sparse)
    for number in range(8):
        assert one_step(plain, theirs, number) == one_step(ours, mine, number)
    assert_equal(plain, ours)
    nothing_gathered(engine)


def test_a_checkpoint_right_after_the_step(offload: MakeEngine, pair: Any, tmp_path: Path) -> None:
    plain, ours, theirs, mine, engine = pair()
    for number in range(2):
        assert one_step(plain, theirs, number) == one_step(ours, mine, number)
    assert waiting(engine) or left(engine)
    engine.save(tmp_path / "saved")
    engine.close()
    again = build(DEEP)
    with offload(again, host={"budget": "64MiB"}, **SETTINGS) as other:
        optimizer = infinity.AdamW(again.parameters(), lr=1e-2)
        other.load(tmp_path / "saved")
        for number in (2, 3):
            assert one_step(plain, theirs, number) == one_step(again, optimizer, number)
        assert_equal(plain, again)


def test_closing_with_updates_that_wait(pair: Any) -> None:
    _, ours, _, mine, engine = pair()
    one_step(ours, mine, 0)
    engine.close()
    assert engine._runtime.pool.leased_nbytes == 0


def test_blocks_that_run_twice(offload: MakeEngine) -> None:
    """They hold their gradients until the end of backward, beside those that wait for the next forward."""
    make = partial(Net, blocks=8, repeat=2)
    budget = smallest_budget(offload, "host", build(make), **SETTINGS)
    n_left: list[int] = []
    for more in range(12):
        host = {"budget": budget + more * 3 * STEP_NBYTES}
        plain, ours = build(make), build(make)
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        with offload(ours, host=host, **SETTINGS) as engine:
            n_left.append(len(left(engine)))
            mine = infinity.AdamW(ours.parameters(), lr=1e-2)
            for number in range(3):
                assert one_step(plain, theirs, number) == one_step(ours, mine, number)
            assert_equal(plain, ours)
    assert max(n_left) > 0


def test_updates_whose_state_is_in_memory_wait_as_well(offload: MakeEngine) -> None:
    """They leave the drives as they are, and the optimizer has work in the next forward."""
    with offload(build(DEEP), host={"budget": "256MiB"}, **SETTINGS) as engine:
        placement = engine.plan.placement
        assert left(engine) and left(engine) <= placement.pinned_states
        assert len(left(engine)) <= len(engine._runtime.units) // 4
    assert_parity(LOOP, offload, host={"budget": "256MiB"}, **SETTINGS)


def test_none_but_under_overlapped(offload: MakeEngine) -> None:
    with offload(build(DEEP), host={"budget": "1MiB"}, schedule="synchronous") as engine:
        assert not left(engine)
