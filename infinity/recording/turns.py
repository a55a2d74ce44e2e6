"""Other orders of a replay, in which what is held together is filled in one turn, so that less is held at a time.

Steps depend on those that gave what they read its values, and on those that read or changed what they change. Blocks
that are held together (parameters of a group) have their turn with all steps that concern them and all that these
depend on, in the order of the tape. Random numbers come from the states of ordinary construction in two ways:

- Every drawing depends on the one before it, so that all are done in their order.
- The drawings of a tape are done twice: at first all of them in their order, in memory that is thrown away, and the
  generator's state is noted before those that will not follow the drawing after which they come on the tape; then each
  in its turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from infinity.recording.plan import Need, Numbers, ReplayPlan, Step, plan_of
from infinity.recording.tape import Block, Operation, Reseeded, Track


def in_turns(plan: ReplayPlan, together: Sequence[Collection[Block]]) -> ReplayPlan:
    """The same steps, with all drawings in their order.

    Args:
        together: blocks that are held together, each in one of the collections at most.
    """
    steps: list[Step] = []
    for _, of_tape in groupby(plan.steps, key=lambda step: id(step.tape)):
        mine = list(of_tape)
        steps += (mine[number] for number in _order(mine, together, keeps_drawings=True))
    return plan_of(steps, plan.undefined)


def in_turns_drawn_twice(plan: ReplayPlan, together: Sequence[Collection[Block]]) -> ReplayPlan | None:
    """The same values, with the drawings of every tape done twice; None where one of them needs values to be drawn.

    Args:
        together: as above.
    """
    steps: list[Step] = []
    for _, of_tape in groupby(plan.steps, key=lambda step: id(step.tape)):
        mine = list(of_tape)
        if any(isinstance(step.entry, Operation) and step.entry.track and step.entry.reads for step in mine):
            return None
        valued = [step for step in mine if isinstance(step.entry, Operation) and step.need is Need.VALUES]
        second = _put_back([valued[number] for number in _order(valued, together, keeps_drawings=False)], mine)
        put_back = {id(step.entry) for step in second if step.numbers is Numbers.PUT_BACK}
        steps += (_drawing(step, put_back) for step in mine if _draws(step))
        steps += second
    return plan_of(steps, plan.undefined)


def _draws(step: Step) -> bool:
    return isinstance(step.entry, Reseeded) or step.entry.track is not None


def _drawing(step: Step, put_back: Collection[int]) -> Step:
    """The step of the first pass."""
    if isinstance(step.entry, Reseeded):
        return step
    numbers = Numbers.NOTED if id(step.entry) in put_back else Numbers.GO_ON
    return Step(step.tape, step.entry, Need.NUMBERS, numbers)


def _put_back(steps: Iterable[Step], on_tape: Iterable[Step]) -> list[Step]:
    """The steps of the second pass, of which those put back their state that do not follow the one before them."""
    before: dict[int, int | None] = {}
    last: dict[Track, int] = {}
    for step in on_tape:
        if step.entry.track is not None:
            before[id(step.entry)] = last.get(step.entry.track)
            last[step.entry.track] = id(step.entry)
    last = {}
    found = []
    for step in steps:
        track = step.entry.track
        if track is not None:
            is_next = track in last and before[id(step.entry)] == last[track]
            last[track] = id(step.entry)
            found.append(step if is_next else Step(step.tape, step.entry, step.need, Numbers.PUT_BACK))
        else:
            found.append(step)
    return found


def _order(steps: Sequence[Step], together: Sequence[Collection[Block]], *, keeps_drawings: bool) -> list[int]:
    """Numbers of steps of one tape in their new order."""
    needs = _dependencies(steps, keeps_drawings=keeps_drawings)
    number_of = {block: number for number, blocks in enumerate(together) for block in blocks}
    concerning: dict[int, list[int]] = {}
    for number, step in enumerate(steps):
        for block in _blocks(step):
            if block in number_of:
                concerning.setdefault(number_of[block], []).append(number)

    def turn(numbers: Sequence[int]) -> int:
        """By the last drawing where drawings keep their order, because it needs all before it."""
        drawn = [number for number in numbers if steps[number].entry.track is not None] if keeps_drawings else []
        return drawn[-1] if drawn else numbers[0]

    order: list[int] = []
    done = [False] * len(steps)
    for wanted in [*sorted(concerning.values(), key=turn), list(range(len(steps)))]:
        found, open_ones = [], list(wanted)
        while open_ones:
            number = open_ones.pop()
            if not done[number]:
                done[number] = True
                found.append(number)
                open_ones += needs[number]
        order += sorted(found)
    return order


def _dependencies(steps: Sequence[Step], *, keeps_drawings: bool) -> list[list[int]]:
    """Of every step those that must be done before it."""
    needs: list[list[int]] = []
    changed: dict[Block, int] = {}
    read: dict[Block, list[int]] = {}
    drawn: int | None = None
    for number, step in enumerate(steps):
        mine: list[int] = []
        if step.need is Need.VALUES and isinstance(step.entry, Operation):
            for block in dict.fromkeys(region.block for region in step.entry.reads):
                mine += [changed[block]] if block in changed else []
                read.setdefault(block, []).append(number)
            for block in dict.fromkeys(region.block for region in step.entry.writes):
                mine += [changed[block]] if block in changed else []
                mine += (reader for reader in read.pop(block, ()) if reader != number)
                changed[block] = number
        if keeps_drawings and _draws(step):
            mine += [] if drawn is None else [drawn]
            drawn = number
        needs.append(mine)
    return needs


def _blocks(step: Step) -> Iterable[Block]:
    if step.need is not Need.VALUES or isinstance(step.entry, Reseeded):
        return ()
    return dict.fromkeys(region.block for region in (*step.entry.reads, *step.entry.writes))
