"""One rank of a training run on virtual time: the engine's own scheduler and update pipeline, nothing else real.

`ReadAhead`, `UpdatePipeline`, residency, budgets and placement are those of the engine. What is written here is the
training thread around them - gather, compute, harvest, in the order in which the hooks of a model do it - with seconds
in place of work.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial

from infinity.plan.scenario import Scenario
from infinity.plan.simulated_drives import Moved
from infinity.plan.timeline import Span
from infinity.plan.training_thread import TrainingThread
from infinity.plan.virtual import PlanLoop
from storage.types import Op

_STEPS = 4  # the first ones fill what a step finds; the last one is the answer


@dataclass(slots=True)
class Simulated:
    """What a run on virtual time gave.

    Attributes:
        step_s: seconds of a step once every step is like the one before.
        steps_s: when each step ended; the last one is followed by what was still being written until `end_s`.
        stalls_s: seconds of the last step in which the training thread waited, by cause.
        compute_s: seconds of the last step in which it computed.
        busy_s: seconds of the last step in which a resource worked.
        read_nbytes, write_nbytes: bytes on all drives of this rank, of the last step; `traffic` by kind.
        peaks: most bytes held of every budget.
        spans: everything on the timeline of the last step, when it was asked for.
    """

    step_s: float
    steps_s: list[float]
    end_s: float
    stalls_s: dict[str, float]
    compute_s: float
    busy_s: dict[str, float]
    read_nbytes: int
    write_nbytes: int
    traffic: dict[str, int]
    peaks: dict[str, int]
    spans: list[Span] = field(default_factory=list)
    transfers: list[Moved] = field(default_factory=list)  # of all steps, as they ended


def simulate(scenario: Scenario, *, steps: int = _STEPS, is_last: bool = False, keep_spans: bool = False) -> Simulated:
    """Run a few steps on virtual time. The same scenario always gives the same numbers.

    Args:
        is_last: nothing is read ahead for a step after these.

    Raises:
        InfinityError: the engine itself would fail here.
    """
    with asyncio.Runner(loop_factory=partial(PlanLoop, scenario.speeds.hand_over_s)) as runner:
        return runner.run(_run(scenario, steps, is_last=is_last, keep_spans=keep_spans))


async def _run(scenario: Scenario, steps: int, *, is_last: bool, keep_spans: bool) -> Simulated:
    loop = asyncio.get_running_loop()
    thread, last = TrainingThread(scenario), steps - 1
    machinery, ends = thread.machinery, [0.0]
    for number in range(steps):
        thread.begin_step()
        await thread.step(is_last=is_last and number == last)
        ends.append(loop.time())
    stalls_s, compute_s, busy_s = thread.time.stalls_s, thread.time.compute_s, thread.busy_s()
    peaks = {budget.name: budget.peak_nbytes for budget in machinery.budgets}
    await machinery.settle()
    store = machinery.store
    result = Simulated(
        step_s=ends[-1] - ends[-2],
        steps_s=ends[1:],
        end_s=loop.time(),
        stalls_s=stalls_s,
        compute_s=compute_s,
        busy_s=busy_s,
        read_nbytes=store.nbytes(Op.READ, last),
        write_nbytes=store.nbytes(Op.WRITE, last),
        traffic={f"{op.value}/{kind}": nbytes for (op, kind, step), nbytes in store.traffic.items() if step == last},
        peaks=peaks,
        spans=thread.spans_since(ends[-2]) if keep_spans else [],
        transfers=store.log,
    )
    machinery.close()
    return result
