"""One rank of a training run on virtual time: the engine's own scheduler and update pipeline, nothing else real.

`ReadAhead`, `UpdatePipeline`, residency, budgets and placement are those of the engine. What is written here is the
training thread around them - gather, compute, harvest, in the order in which the hooks of a model do it - with seconds
in place of work.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from functools import partial

from infinity.plan.recurrence import Recurrence
from infinity.plan.scenario import Scenario
from infinity.plan.simulated_drives import Moved
from infinity.plan.timeline import Span, in_order
from infinity.plan.training_thread import TrainingThread
from infinity.plan.virtual import PlanLoop
from storage.types import Op

ENOUGH_MICRO_BATCHES = 4  # micro-batches, after which each is like the one before
MOST_MICRO_BATCHES = 8  # that are all simulated; two runs of fewer cost as much
_STEPS = 4  # the first ones fill what a step finds; the last one is the answer
_MOST_STEPS = 8  # where the answer is to be a step that goes as the one before; nearly all do by the third


@dataclass(slots=True)
class Simulated:
    """What a run on virtual time gave.

    Attributes:
        step_s: seconds of a step once every step is like the one before.
        steps_s: when each step ended; the last one is followed by what was still being written, and by what showed that
            further ones would be like it, until `end_s`.
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
    # Not shown: the loop's runner asks its task for its text, and there may be tens of thousands.
    spans: list[Span] = field(default_factory=list, repr=False)
    transfers: list[Moved] = field(default_factory=list, repr=False)  # of all steps, as they ended


def simulate(
    scenario: Scenario,
    *,
    steps: int = _STEPS,
    is_last: bool = False,
    until_repeated: bool = False,
    keep_spans: bool = False,
) -> Simulated:
    """Run a few steps on virtual time. The same scenario always gives the same numbers.

    Args:
        is_last: nothing is read ahead for a step after these.
        until_repeated: fewer steps do once one begins as the one before.

    Raises:
        InfinityError: the engine itself would fail here.
    """
    with asyncio.Runner(loop_factory=partial(PlanLoop, scenario.speeds.hand_over_s)) as runner:
        return runner.run(_run(scenario, steps, is_last=is_last, until_repeated=until_repeated, keep_spans=keep_spans))


def simulate_long(scenario: Scenario, *, keep_spans: bool = False) -> Simulated:
    """The same for any number of micro-batches, until steps repeat; of very many only the first are simulated.

    From the third on each finds what the one before it found, and adds the same: seconds, bytes and waits. The spans
    and transfers are of those that were simulated.
    """
    count = scenario.micro_batches
    if count <= MOST_MICRO_BATCHES:
        return _settled(scenario, keep_spans=keep_spans)
    fewer = _settled(replace(scenario, micro_batches=ENOUGH_MICRO_BATCHES - 1))
    few = _settled(replace(scenario, micro_batches=ENOUGH_MICRO_BATCHES), keep_spans=keep_spans)
    return _continued(fewer, few, count - ENOUGH_MICRO_BATCHES)


def _settled(scenario: Scenario, *, keep_spans: bool = False) -> Simulated:
    return simulate(scenario, steps=_MOST_STEPS, until_repeated=True, keep_spans=keep_spans)


def _continued(fewer: Simulated, few: Simulated, more: int) -> Simulated:
    """A step of as many micro-batches as `few` has and so many `more`, each adding what `few` has over `fewer`."""

    def on(before: float, after: float) -> float:
        return after + more * max(after - before, 0.0)

    def on_all(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
        return {name: on(before.get(name, 0.0), seconds) for name, seconds in after.items()}

    longer_s = on(fewer.step_s, few.step_s) - few.step_s
    return replace(
        few,
        step_s=few.step_s + longer_s,
        steps_s=[end_s + longer_s * number for number, end_s in enumerate(few.steps_s, 1)],
        end_s=few.end_s + longer_s * len(few.steps_s),
        stalls_s=on_all(fewer.stalls_s, few.stalls_s),
        compute_s=on(fewer.compute_s, few.compute_s),
        busy_s=on_all(fewer.busy_s, few.busy_s),
        read_nbytes=few.read_nbytes + more * (few.read_nbytes - fewer.read_nbytes),
        write_nbytes=few.write_nbytes + more * (few.write_nbytes - fewer.write_nbytes),
        traffic={kind: n + more * (n - fewer.traffic.get(kind, 0)) for kind, n in few.traffic.items()},
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """What is told of a step at its end; see `Simulated`."""

    stalls_s: dict[str, float]
    compute_s: float
    busy_s: dict[str, float]
    spans: list[Span]

    @classmethod
    def of(cls, thread: TrainingThread, began_s: float, *, keep_spans: bool) -> _Step:
        spans = in_order(thread.spans_since(began_s)) if keep_spans else []
        return cls(thread.time.stalls_s, thread.time.compute_s, thread.busy_s(), spans)


async def _run(scenario: Scenario, steps: int, *, is_last: bool, until_repeated: bool, keep_spans: bool) -> Simulated:
    loop = asyncio.get_running_loop()
    thread = TrainingThread(scenario)
    machinery, ends, recurrence = thread.machinery, [0.0], Recurrence(thread)
    for number in range(steps):
        thread.begin_step()
        await thread.forward()
        if until_repeated and recurrence.is_repeated(ends[-1]):
            break
        await thread.rest_of_step(is_last=is_last and number == steps - 1)
        step = _Step.of(thread, ends[-1], keep_spans=keep_spans)
        ends.append(loop.time())
    peaks = {budget.name: budget.peak_nbytes for budget in machinery.budgets}  # no step has those of the end
    await machinery.settle()
    store, last = machinery.store, len(ends) - 2
    result = Simulated(
        step_s=ends[-1] - ends[-2],
        steps_s=ends[1:],
        end_s=loop.time(),
        stalls_s=step.stalls_s,
        compute_s=step.compute_s,
        busy_s=step.busy_s,
        read_nbytes=store.nbytes(Op.READ, last),
        write_nbytes=store.nbytes(Op.WRITE, last),
        traffic={f"{op.value}/{kind}": nbytes for (op, kind, at), nbytes in store.traffic.items() if at == last},
        peaks=peaks,
        spans=step.spans,
        transfers=store.log,
    )
    machinery.close()
    return result
