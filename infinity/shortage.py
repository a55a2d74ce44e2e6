"""What to say when the device budget is enough for what the model is made of, but not for how its forward uses it.

How often a unit is called, and whether its parameters are used outside of it, shows only when the model runs. Both keep
device memory that the plan has given to others: the gradient of a unit that is called several times is complete after
its last backward, and parameters used outside their unit stay until the forward, or the backward, is over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from infinity.demand import completed_late
from infinity.errors import DeviceOutOfMemoryError
from infinity.groups import FlatGroup, Unit
from infinity.placement import Placement
from infinity.sizes import format_minimum_nbytes


def explain_shortage(
    error: DeviceOutOfMemoryError,
    placement: Placement,
    units: Iterable[Unit],
    called_several_times: Collection[int],
    used_elsewhere: Iterable[FlatGroup],
) -> DeviceOutOfMemoryError:
    """The same error, with the device budget that works when the model goes on as until now.

    Args:
        called_several_times: indices of units that ran more than once in this iteration.
        used_elsewhere: groups with parameters that were used outside their unit.
    """
    streamed = [unit for unit in units if not unit.resident]
    elsewhere = {group.index: group for group in used_elsewhere}
    planned = completed_late(streamed)
    late = {
        group.index: group
        for unit in streamed
        if unit.index in called_several_times
        for group in unit.trainable()
        if group.index not in planned
    }
    late |= {index: group for index, group in elsewhere.items() if group.trainable and index not in planned}
    if not elsewhere and not late:
        return error
    more_nbytes = sum(group.flat_nbytes for group in (*elsewhere.values(), *late.values()))
    names = ", ".join(sorted({group.key for group in (*elsewhere.values(), *late.values())}))
    needed_nbytes = placement.device_minimum_nbytes + more_nbytes
    return DeviceOutOfMemoryError(
        f"{error}. This forward calls units several times, or uses parameters outside their units ({names}), which "
        "keeps their gradients, or the parameters too, on the device while others run; that shows only now. As far as "
        f"it has shown, the smallest device budget that works is {format_minimum_nbytes(needed_nbytes)} "
        f"({needed_nbytes} bytes)"
    )
