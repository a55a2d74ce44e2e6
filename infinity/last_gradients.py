"""Which gradients wait for `step()` in the room in which others pass to the swap file.

[Note: last gradients]
Gradients that do not fit in host memory pass it on their way to the swap file. The last ones of a backward have nobody
behind them who waits for that room, so they stay there and are updated first: `step()` needs no memory for gradients
on their way. That saves a write and a read of as much as transit holds, which is what holding groups whole takes from
the state that could lie there instead. It is for the schedule alone in which `step()` waits for all updates: a deferred
one may wait for a forward that never uses its group, while the next backward waits for the room. And it is for models
in which gradients are complete in the order of the units, so that none comes after these.
"""

from __future__ import annotations

from collections.abc import Set

from infinity.config import Schedule
from infinity.demand import Request, Sizes, completed_late


def lasting_gradients(request: Request, sizes: Sizes, passing: Set[int], transit_nbytes: int) -> frozenset[int]:
    """Groups whose gradients transit holds from the end of a backward to `step()`.

    Args:
        passing: indices of the groups whose gradients go through it.
    """
    if request.schedule is not Schedule.SYNCHRONOUS or passing & completed_late(request.units):
        return frozenset()
    chosen, room_nbytes = [], transit_nbytes
    groups = [group for group in sizes.streamed if group.index in passing]
    for group in sorted(groups, key=lambda g: (min(g.units), -g.index)):  # the last one first
        room_nbytes -= sizes.held_gradient_nbytes[group.index]
        if room_nbytes < 0:
            break
        chosen.append(group.index)
    return frozenset(chosen)
