"""Which recorded operations are needed for some storages, and from when to when each storage needs memory.

An operation whose values are all overwritten before anything reads them is not done; if it draws random numbers, they
are drawn in memory that is thrown away, because those after them would be others. What is overwritten is told by bytes,
so a projection that is filled in three parts counts as filled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from infinity.recording.tape import Block, Operation, Region, Reseeded, Tape

_Bytes = list[tuple[int, int]]


class Need(Enum):
    """What a replay does at an entry."""

    NOTHING = auto()
    NUMBERS = auto()  # the random numbers alone
    VALUES = auto()


class Numbers(Enum):
    """What a drawing does about the state of its generator."""

    GO_ON = auto()
    NOTED = auto()  # the state before it is noted
    PUT_BACK = auto()  # it begins in the state that was noted for the same operation


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of a tape that is needed."""

    tape: Tape
    entry: Operation | Reseeded
    need: Need
    numbers: Numbers = Numbers.GO_ON


@dataclass(slots=True)
class ReplayPlan:
    """What is replayed, of one tape after another.

    Attributes:
        steps: in the order of the tape, or in another one; see turns.py.
        spans: for every block that gets values, the numbers of its first and its last step.
        undefined: blocks whose values depend on memory that nothing ever filled.
    """

    steps: list[Step] = field(default_factory=list)
    spans: dict[Block, tuple[int, int]] = field(default_factory=dict)
    undefined: set[Block] = field(default_factory=set)

    def peak_nbytes(
        self, extents: Sequence[tuple[tuple[int, int], int]], counts: Callable[[int], bool], align: Callable[[int], int]
    ) -> int:
        """Bytes held at most.

        Args:
            extents: first and last step and size of what holds memory between them.
            counts: of a piece of memory, by its size, whether it counts.
            align: the memory that is taken for a size.
        """
        changes = [0] * (len(self.steps) + 2)  # there may be memory but no step
        for (first, last), nbytes in extents:
            if counts(nbytes):
                changes[first] += nbytes
                changes[last + 1] -= nbytes
        held = peak = 0
        for number in range(max(1, len(self.steps))):
            held += changes[number] + (_noted_nbytes(self.steps[number], counts) if number < len(self.steps) else 0)
            scratch = _scratch_nbytes(self.steps[number]) if number < len(self.steps) else []
            peak = max(peak, held + sum(align(nbytes) for nbytes in scratch if counts(nbytes)))
        return peak


def _noted_nbytes(step: Step, counts: Callable[[int], bool]) -> int:
    """By how much the noted states of generators grow."""
    nbytes = 0 if step.numbers is Numbers.GO_ON or step.entry.track is None else step.entry.track.start.nbytes
    return (nbytes if step.numbers is Numbers.NOTED else -nbytes) if counts(nbytes) else 0


def _scratch_nbytes(step: Step) -> list[int]:
    """Memory beside that of the blocks."""
    if isinstance(step.entry, Reseeded) or (step.need is Need.VALUES and not step.entry.made):
        return []
    return [region.stop - region.start for region in step.entry.writes]


def plan_replay(wanted: Mapping[Tape, Collection[Region]], *, draws: bool) -> ReplayPlan:
    """Plan the replay of tapes, of each for the regions that are wanted of it.

    Args:
        draws: draw the numbers of operations that are not needed.
    """
    found: list[Step] = []
    undefined: set[Block] = set()
    for tape, regions in wanted.items():
        live: dict[Block, _Bytes] = {}
        for region in regions:
            _add(live, region)
        steps = [Step(tape, entry, _need(entry, live, draws=draws)) for entry in reversed(tape.entries)]
        needed = [step for step in reversed(steps) if step.need is not Need.NOTHING]
        undefined |= _undefined(live.keys(), needed)
        found += needed
    return plan_of(found, undefined)


def plan_of(steps: list[Step], undefined: set[Block]) -> ReplayPlan:
    """The plan of doing these steps."""
    plan = ReplayPlan(steps, undefined=undefined)
    for number, step in enumerate(plan.steps):
        if step.need is Need.VALUES and isinstance(step.entry, Operation):
            for region in (*step.entry.reads, *step.entry.writes):
                first, _ = plan.spans.get(region.block, (number, number))
                plan.spans[region.block] = first, number
    return plan


def _need(entry: Operation | Reseeded, live: dict[Block, _Bytes], *, draws: bool) -> Need:
    """What is to be done at an entry, given what is read after it; `live` becomes what is read after the one before."""
    if isinstance(entry, Reseeded):
        return Need.VALUES
    if not any(_overlaps(live.get(region.block, ()), region) for region in entry.writes):
        if not draws or entry.track is None:
            return Need.NOTHING
        if not entry.reads:
            return Need.NUMBERS
        # How many numbers it draws may depend on what it reads, so that is needed.
    for region in entry.writes if entry.overwrites else entry.made:
        if region.is_dense:
            _remove(live, region)
    for region in entry.reads:
        _add(live, region)
    return Need.VALUES


def _undefined(blocks: Iterable[Block], steps: Sequence[Step]) -> set[Block]:
    """Those blocks, and what is made of them. Columns that are filled count as all; see `is_untouched` for the rest."""
    entries = [e for step in steps if step.need is Need.VALUES and isinstance(e := step.entry, Operation)]
    filled_partly = {r.block for e in entries for r in (e.writes if e.overwrites else e.made) if not r.is_dense}
    undefined = {block for block in blocks if block.is_foreign or block not in filled_partly}
    for entry in entries:
        if any(region.block in undefined for region in entry.reads):
            undefined |= {region.block for region in entry.writes}
    return undefined


def _overlaps(spans: Sequence[tuple[int, int]], region: Region) -> bool:
    return any(start < region.stop and region.start < stop for start, stop in spans)


def _add(live: dict[Block, _Bytes], region: Region) -> None:
    if region.numel:
        joined = (region.start, region.stop)
        apart = []
        for start, stop in live.get(region.block, ()):
            if start <= joined[1] and joined[0] <= stop:
                joined = min(start, joined[0]), max(stop, joined[1])
            else:
                apart.append((start, stop))
        live[region.block] = [*apart, joined]


def _remove(live: dict[Block, _Bytes], region: Region) -> None:
    left = []
    for start, stop in live.pop(region.block, ()):
        left += [(start, min(stop, region.start)), (max(start, region.stop), stop)]
    if left := [(start, stop) for start, stop in left if start < stop]:
        live[region.block] = left
