"""Which updates the overlapped schedule leaves for the next forward, so that the drives have work there too.

[Note: balance of a step]
With every update in backward a step that its drives bound leaves them idle for most of the forward, which computes for
longer than it reads, while backward waits for them. So a few updates wait until the next forward comes to their units,
as all do under the deferred schedule: the same bytes and the same bits, moved to where the drives are free.

Their gradients wait in the room that gradients have anyway. Two units need of it what makes backward flow: one that is
updated while the next one arrives. What is left may wait, evenly spread, because what the drives have left over in
forward grows with every unit that computes. At most one unit in four waits: a forward is a third of a step's computing
or less, and reads parameters as well.

Optimizer state that is in host memory for good leaves the drives free in backward, for a backward computes two or three
times as long as a forward: then less of what lies on the drives is left for the next forward, and nothing from a third
of the state on. In its place updates wait whose state is in host memory. They cost the drives nothing, and where the
optimizer is what binds a step, a forward without updates leaves it as idle.

Where steps are durable none waits: a step is committed when all of it has been updated, and memory that is written from
must not change before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set

from infinity.config import Schedule
from infinity.demand import Request, Sizes, completed_late
from infinity.groups import FlatGroup

_FLOWING = 2  # units whose gradients need room while backward flows
_LARGEST_PART = 4  # of so many units that train one may wait
_BACKWARDS = 3  # forwards that a backward takes, with recomputation
_SMALL_PART = 8  # updates of less than one part in so many of the largest unit's are too short to balance anything


def updated_in_forward(
    request: Request,
    sizes: Sizes,
    *,
    room_nbytes: int,
    held: Set[int],
    held_part: float,
    able: Callable[[FlatGroup], bool],
) -> frozenset[int]:
    """Indices of groups whose updates wait for the next forward; none but under `overlapped`, without durable steps.

    Args:
        room_nbytes: host memory for gradients between backward and update.
        held: groups whose whole optimizer state is in host memory for good.
        held_part: the part of the optimizer state that is in host memory for good.
        able: whether the update of a group moves no more bytes in the next forward than in backward.
    """
    if request.schedule is not Schedule.OVERLAPPED or request.is_durable:
        return frozenset()
    late = completed_late(request.units) | {g.index for g in request.groups if g.index in sizes.chunked}
    training = [unit for unit in request.units if not unit.resident and any(g.trainable for g in unit.groups)]
    largest_nbytes = max(sizes.unit_gradients_nbytes, default=0)
    stored: list[list[FlatGroup]] = []
    in_memory: list[list[FlatGroup]] = []
    for unit in training:
        groups = [group for group in unit.groups if group.trainable]
        is_small = _SMALL_PART * _nbytes(sizes, [groups]) < largest_nbytes
        if not is_small and all(group.index not in late and able(group) for group in groups):
            (in_memory if all(group.index in held for group in groups) else stored).append(groups)
    most = len(training) // _LARGEST_PART
    most_stored = math.ceil(len(training) * max(1 - _BACKWARDS * held_part, 0) / _LARGEST_PART)
    resident_nbytes = sum(sizes.held_gradient_nbytes[index] for index in sizes.resident)
    left_nbytes = room_nbytes - max(_FLOWING * largest_nbytes, resident_nbytes)
    chosen: list[list[FlatGroup]] = []
    for waiting, limit in ((stored, most_stored), (in_memory, most)):
        chosen += _spread(sizes, waiting, min(limit, most - len(chosen)), left_nbytes - _nbytes(sizes, chosen))
    return frozenset(group.index for groups in chosen for group in groups)


def _spread(sizes: Sizes, waiting: list[list[FlatGroup]], most: int, left_nbytes: int) -> list[list[FlatGroup]]:
    """As many of them as may wait, evenly spread, whose gradients fit."""
    for count in range(min(most, len(waiting)), 0, -1):
        chosen = [waiting[number * len(waiting) // (count + 1)] for number in range(1, count + 1)]
        if _nbytes(sizes, chosen) <= left_nbytes:
            return chosen
    return []


def _nbytes(sizes: Sizes, units: list[list[FlatGroup]]) -> int:
    """Of the gradients of units."""
    return sum(sizes.held_gradient_nbytes[group.index] for groups in units for group in groups)
