"""Any placement of any units, on a virtual clock: newest bytes, closed forms whatever the timing, no deadlock."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity.config import Schedule
from infinity.layout import SHARD_ALIGN_NUMEL
from infinity.order import Access
from infinity.plan.traffic import expected_step_traffic
from infinity.testing import SimulatedStore, run_virtual
from storage.types import Op
from tests.scheduler.planned import FIELDS, PlannedRun, UnitShape, plan

PAGE = SHARD_ALIGN_NUMEL * 4
STEPS = 3


@st.composite
def models(draw: st.DrawFn, *, may_share: bool = False) -> list[UnitShape]:
    """Units of one or two groups, trained or frozen; perhaps one that stays on the device."""
    pages = st.lists(st.sampled_from([1, 1, 2, 3, 6, -1, -4]), min_size=1, max_size=2).map(tuple)
    shapes: list[UnitShape] = []
    n_groups = 0
    for _ in range(draw(st.integers(1, 6))):
        own = draw(pages)
        borrowed = draw(st.sets(st.integers(0, n_groups - 1), max_size=1)) if may_share and n_groups else ()
        shapes.append(UnitShape(own, tuple(borrowed)))
        n_groups += len(own)
    if draw(st.booleans()):
        shapes.append(UnitShape(draw(pages), resident=True))
    return shapes


def any_timing(chance: random.Random) -> tuple[SimulatedStore, Callable[[Access], float]]:
    store = SimulatedStore(duration_s=lambda op, key, nbytes: chance.choice([0.0, 0.1, 3.0, 50.0]))
    return store, lambda access: chance.choice([0.0, 0.5, 20.0])


def assert_closed_form(run: PlannedRun, step: int, micro_batches: int) -> None:
    expected = expected_step_traffic(run.placement, run.groups, FIELDS, is_first=step == 0, micro_batches=micro_batches)
    for kind, want in (("param", expected.param), ("state", expected.state), ("grad", expected.grad)):
        moved = (run.moved_nbytes(Op.READ, kind, step), run.moved_nbytes(Op.WRITE, kind, step))
        assert moved == (want.read_nbytes, want.write_nbytes), f"{kind} of step {step}"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    shapes=models(may_share=True),
    schedule=st.sampled_from([Schedule.SYNCHRONOUS, Schedule.OVERLAPPED]),
    spare=st.integers(0, 60),
    micro_batches=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_any_placement_moves_what_the_closed_forms_say(
    shapes: list[UnitShape], schedule: Schedule, spare: int, micro_batches: int, seed: int
) -> None:
    if schedule is Schedule.OVERLAPPED:
        micro_batches = 1
    request, placement = plan(shapes, schedule, spare * PAGE // 2)

    async def main(path: Path) -> None:
        run = PlannedRun(path, request, placement, *any_timing(random.Random(seed)))
        for _ in range(STEPS):
            await run.train(micro_batches)
        await run.settle()
        for step in range(STEPS):
            assert_closed_form(run, step, micro_batches)
        await run.close()

    with tempfile.TemporaryDirectory() as folder:
        run_virtual(main(Path(folder)))
