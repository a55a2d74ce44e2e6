"""How refusals and tables tell budgets that the ranks of a machine share: what each has, and what to give for all."""

from __future__ import annotations

from infinity.sizes import format_minimum_nbytes, format_nbytes


def told_budget(rank_nbytes: int, local_size: int, *, is_shared: bool = True) -> str:
    """The budget of one rank.

    Args:
        rank_nbytes: of this rank alone.
        local_size: ranks on this machine.
        is_shared: it is a part of one budget for the machine.
    """
    each = f"{format_nbytes(rank_nbytes)}{_of_each(local_size)} ({rank_nbytes} bytes"
    if local_size == 1 or not is_shared:
        return each + ")"
    return f"{each}; {format_nbytes(rank_nbytes * local_size)} shared by {local_size} ranks on this machine)"


def told_need(rank_nbytes: int, local_size: int, setting: str | None) -> str:
    """What goes behind bytes that one rank needs: that it is one, and how much to give; nothing where it is alone.

    Args:
        setting: where the budget for all ranks of the machine is given; None where each has its own.
    """
    if local_size == 1 or setting is None:
        return _of_each(local_size)
    total_nbytes = rank_nbytes * local_size
    total = f"{setting} = {format_minimum_nbytes(total_nbytes)} ({total_nbytes} bytes)"
    return f"{_of_each(local_size)}; for {local_size} ranks on this machine give {total}"


def told_smallest(rank_nbytes: int, local_size: int, *, is_shared: bool) -> str:
    """What goes beside the budget of one rank in a table: the smallest that works.

    Args:
        is_shared: it is a part of one budget for the machine.
    """
    smallest = format_minimum_nbytes(rank_nbytes)
    if local_size == 1:
        return f"{smallest} is the smallest that works"
    total = format_minimum_nbytes(rank_nbytes * local_size)
    shared = f"; for the {local_size} on this machine {total}" if is_shared else ""
    return f"of each rank, for which {smallest} is the smallest that works{shared}"


def _of_each(local_size: int) -> str:
    return " of each rank" if local_size > 1 else ""
