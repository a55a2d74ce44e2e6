"""Any placement of any units, on a virtual clock: newest bytes, closed forms whatever the timing, no deadlock."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity.config import Schedule
from infinity.layout import SHARD_ALIGN_NUMEL
from infinity.order import Access
from infinity.plan.traffic import expected_step_traffic
from infinity.testing import SimulatedStore, run_virtual
from storage.errors import IoError, ReadError, WriteError
from storage.types import Op
from tests.scheduler.planned import FIELDS, PlannedRun, UnitShape, plan

PAGE = SHARD_ALIGN_NUMEL * 4
STEPS = 3
SCHEDULES = st.sampled_from([Schedule.SYNCHRONOUS, Schedule.OVERLAPPED, Schedule.DEFERRED])
SPARES = st.integers(0, 60).map(lambda half_pages: half_pages * PAGE // 2)
SEEDS = st.integers(0, 2**32)
THOROUGH = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def models(draw: st.DrawFn) -> list[UnitShape]:
    """Units of one or two groups, trained or frozen, some shared; perhaps one unit that stays on the device."""
    pages = st.lists(st.sampled_from([1, 1, 2, 3, 6, -1, -4]), min_size=1, max_size=2).map(tuple)
    shapes: list[UnitShape] = []
    n_groups = 0
    for _ in range(draw(st.integers(1, 6))):
        own = draw(pages)
        borrowed = draw(st.sets(st.integers(0, n_groups - 1), max_size=1)) if n_groups else ()
        shapes.append(UnitShape(own, tuple(borrowed)))
        n_groups += len(own)
    if draw(st.booleans()):
        shapes.append(UnitShape(draw(pages), resident=True))
    return shapes


Failure = Callable[[Op, str], BaseException | None]


def any_timing(
    chance: random.Random, failure: Failure | None = None
) -> tuple[SimulatedStore, Callable[[Access], float]]:
    store = SimulatedStore(duration_s=lambda op, key, nbytes: chance.choice([0.0, 0.1, 3.0, 50.0]), failure=failure)
    return store, lambda access: chance.choice([0.0, 0.5, 20.0])


def assert_closed_form(run: PlannedRun, step: int, micro_batches: int) -> None:
    expected = expected_step_traffic(run.placement, run.groups, FIELDS, is_first=step == 0, micro_batches=micro_batches)
    for kind, want in (("param", expected.param), ("state", expected.state), ("grad", expected.grad)):
        moved = (run.moved_nbytes(Op.READ, kind, step), run.moved_nbytes(Op.WRITE, kind, step))
        assert moved == (want.read_nbytes, want.write_nbytes), f"{kind} of step {step}"


@THOROUGH
@given(
    shapes=models(),
    schedule=SCHEDULES,
    spare=SPARES,
    micro_batches=st.integers(1, 3),
    seed=SEEDS,
)
def test_any_placement_moves_what_the_closed_forms_say(
    shapes: list[UnitShape], schedule: Schedule, spare: int, micro_batches: int, seed: int
) -> None:
    if schedule is Schedule.OVERLAPPED:
        micro_batches = 1
    request, placement = plan(shapes, schedule, spare)

    async def main(path: Path) -> None:
        run = PlannedRun(path, request, placement, *any_timing(random.Random(seed)))
        for _ in range(STEPS):
            await run.train(micro_batches)
        await run.settle()
        for step in range(STEPS):
            assert_closed_form(run, step, micro_batches)
        await run.close()

    in_folder(main)


@THOROUGH
@given(shapes=models(), schedule=SCHEDULES, spare=SPARES, seed=SEEDS)
def test_whatever_runs_in_whatever_order(shapes: list[UnitShape], schedule: Schedule, spare: int, seed: int) -> None:
    """Units are skipped and shuffled, evaluations come between: newest bytes in the memory of the plan."""
    request, placement = plan(shapes, schedule, spare)

    async def main(path: Path) -> None:
        chance = random.Random(seed)
        run = PlannedRun(path, request, placement, *any_timing(chance))
        everything = [unit.index for unit in run.streamed]
        for _ in range(5):
            order = [index for index in everything if chance.random() < 0.8]
            if chance.random() < 0.5:
                chance.shuffle(order)
            await run.train(order=order)
            if chance.random() < 0.5:
                await run.evaluate()
        await run.close()

    in_folder(main)


@THOROUGH
@given(shapes=models(), schedule=SCHEDULES, spare=SPARES, seed=SEEDS)
def test_an_evaluation_between_two_steps_reads_every_shard_once(
    shapes: list[UnitShape], schedule: Schedule, spare: int, seed: int
) -> None:
    """What was read ahead for a step may serve the evaluation before it, and the other way round: the sum is fixed."""
    request, placement = plan(shapes, schedule, spare)

    async def main(path: Path) -> None:
        run = PlannedRun(path, request, placement, *any_timing(random.Random(seed)))
        await run.train()
        await run.evaluate()
        await run.train()
        await run.settle()
        expected = 0
        for is_first in (True, False):
            expected += expected_step_traffic(placement, run.groups, FIELDS, is_first=is_first).param.read_nbytes
        for group in run.groups:
            if not run.copies[group.index].pinned:
                is_kept = group.index in placement.keep_at_boundary
                expected += group.shard_nbytes * (0 if is_kept else placement.uses[group.index])
        ahead = sum(copy.group.shard_nbytes for copy in run.copies if not copy.pinned and copy.block is not None)
        kept = sum(run.groups[index].shard_nbytes for index in placement.keep_at_boundary)
        moved = [t.nbytes for t in run.store.log if t.op is Op.READ and t.tag.kind in ("param", "param_eval")]
        assert sum(moved) - (ahead - kept) == expected
        await run.close()

    in_folder(main)


@THOROUGH
@given(shapes=models(), spare=SPARES, seed=SEEDS)
def test_reads_that_fail_are_told_and_tried_again(shapes: list[UnitShape], spare: int, seed: int) -> None:
    request, placement = plan(shapes, Schedule.OVERLAPPED, spare)

    async def main(path: Path) -> None:
        chance = random.Random(seed)
        run = PlannedRun(path, request, placement, *any_timing(chance, failure))
        for _ in range(STEPS):
            await run.train()
            await run.evaluate()
        assert not run.failures
        await run.close()

    def failure(op: Op, key: str) -> BaseException | None:
        # Shared shards are read by their updates too, which are lost when that fails.
        is_shard = op is Op.READ and any(g.key == key and len(g.units) == 1 for g in request.groups)
        return ReadError("on purpose") if is_shard and failing.random() < 0.2 else None

    failing = random.Random(seed + 1)
    in_folder(main)


@THOROUGH
@given(shapes=models(), schedule=SCHEDULES, spare=SPARES, rate=st.sampled_from([0.01, 0.1, 0.5]), seed=SEEDS)
def test_any_failure_is_raised_and_nothing_stays_held(
    shapes: list[UnitShape], schedule: Schedule, spare: int, rate: float, seed: int
) -> None:
    request, placement = plan(shapes, schedule, spare)
    failing = random.Random(seed + 1)
    made: set[tuple[type[BaseException], str]] = set()

    def failure(op: Op, key: str) -> BaseException | None:
        if failing.random() >= rate:
            return None
        number = len(made)
        error = ReadError(f"on purpose {number}") if op is Op.READ else WriteError(f"on purpose {number}")
        made.add(kind_of(error))
        return error

    def kind_of(error: BaseException) -> tuple[type[BaseException], str]:
        return type(error), str(error)  # a lost update is told again by an error like it

    async def main(path: Path) -> None:
        run = PlannedRun(path, request, placement, *any_timing(random.Random(seed), failure))
        try:
            for _ in range(STEPS):
                await run.train()
        except IoError as error:
            assert kind_of(error) in made
        assert all(kind_of(error) in made for error in run.failures)
        await run.close()

    in_folder(main)


def in_folder(main: Callable[[Path], Coroutine[Any, Any, None]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_virtual(main(Path(folder)))
