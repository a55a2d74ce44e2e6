"""Which of a row of things are chosen so that those chosen are spread evenly over the row.

[Note: state in host memory]
State that lies in host memory for good is updated as fast as memory allows and leaves the drives nothing to do; state
that lies in the swap files keeps the drives busy, and the optimizer waits for them. Were all of the former in one part
of the model, a backward would need the sum of both times. Evenly spread, the updates of groups that lie in memory fall
into the pauses that the drives leave the optimizer, and the step needs the longer of the two.
"""

from __future__ import annotations

from collections.abc import Sequence


def evenly_chosen(sizes: Sequence[int], room: int) -> list[int]:
    """Numbers of things that fit in the room together, so that every part of the row has its part of them.

    The first one is among them if it fits; what rounding leaves of the room goes to the first ones that fit in it.

    Args:
        sizes: of the things, in order; more than 0.
    """
    total, chosen, taken, passed = sum(sizes), set[int](), 0, 0
    for number, size in enumerate(sizes):
        is_due = taken * total <= passed * min(room, total)  # in whole numbers: nothing depends on rounding
        passed += size
        if is_due and taken + size <= room:
            chosen.add(number)
            taken += size
    for number, size in enumerate(sizes):
        if number not in chosen and taken + size <= room:
            chosen.add(number)
            taken += size
    return sorted(chosen)
