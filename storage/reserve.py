"""Reserving a store's capacity on its drives: by speed, and where a drive has too little room, on the others."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from storage.align import PAGE_NBYTES, align_down, align_up
from storage.drives import Drive
from storage.errors import SwapFullError

_log = logging.getLogger(__name__)
_SHARE_NBYTES = 1 << 16  # a drive's share of the capacity is a multiple of this


def check_arguments(
    paths: Sequence[Path], capacity_nbytes: int, speeds: Sequence[float] | None, files_nbytes: int | None
) -> list[float]:
    """The speeds of the drives of a store that is to be opened, equal if none are given.

    Raises:
        ValueError: no path, a capacity that is negative or beyond `files_nbytes`, or speeds that are not positive
            numbers, one per path.
    """
    if not paths:
        raise ValueError("a shard store needs at least one directory")
    if capacity_nbytes < 0:
        raise ValueError(f"a shard store of {capacity_nbytes} bytes was asked for; the capacity is not negative")
    if files_nbytes is not None and align_up(capacity_nbytes, PAGE_NBYTES) > files_nbytes:
        raise ValueError(
            f"a shard store of {capacity_nbytes} bytes was asked for, but its files may take {files_nbytes} together"
        )
    if speeds is None:
        return [1.0] * len(paths)
    if len(speeds) != len(paths) or not all(speed > 0 and math.isfinite(speed) for speed in speeds):
        raise ValueError(f"speeds are {list(speeds)}; they must be {len(paths)} positive numbers, one per directory")
    return list(speeds)


def open_all(
    paths: Sequence[Path], speeds: Sequence[float], open_one: Callable[[Path, ExitStack], Drive], closing: ExitStack
) -> tuple[list[Drive], list[float]]:
    """Open a drive for each directory, and its speed; one that is so full that not even that works is left out.

    Args:
        open_one: opens a drive, with nothing reserved; the stack closes it.

    Raises:
        SwapFullError: none of them has room for anything.
    """
    drives: list[Drive] = []
    left_out: dict[int, SwapFullError] = {}
    for number, path in enumerate(paths):
        with ExitStack() as opened:
            try:
                drives.append(open_one(Path(path), opened))
            except SwapFullError as error:
                left_out[number] = error
                continue
            closing.push(opened.pop_all())
    if not drives:
        raise next(iter(left_out.values()))
    for number, problem in left_out.items():
        _log.warning("%s is left out, the other drives take its part: %s", paths[number], problem)
    return drives, [speed for number, speed in enumerate(speeds) if number not in left_out]


def reserve(drives: Sequence[Drive], capacity_nbytes: int, speeds: Sequence[float]) -> None:
    """Make the drives' files long enough for `capacity_nbytes` together.

    Every drive gets its share by speed. What a drive has no room for is shared among the others by free space, with a
    warning.

    Raises:
        SwapFullError: all of them together have too little space; says need and have of each.
    """
    short_nbytes = 0
    problems: dict[int, SwapFullError] = {}
    missing_nbytes = max(0, capacity_nbytes - sum(drive.file.extents.capacity_nbytes for drive in drives))
    for number, (drive, share_nbytes) in enumerate(zip(drives, _shares(capacity_nbytes, speeds), strict=True)):
        # Files that are there already may be divided otherwise: never more than is missing in all.
        need_nbytes = min(max(0, share_nbytes - drive.file.extents.capacity_nbytes), missing_nbytes)
        missing_nbytes -= need_nbytes
        try:
            drive.file.grow(need_nbytes)
        except SwapFullError as error:
            problems[number] = error
            short_nbytes += need_nbytes
    if not problems:
        return
    if len(drives) == 1:
        raise problems[0]
    # A drive on which the system refused what seemed to be free has a limit that nobody tells: nothing more for it.
    rooms = {
        number: drive.file.room_nbytes
        for number, drive in enumerate(drives)
        if number not in problems or problems[number].errno is None
    }
    left_nbytes = _spread(drives, short_nbytes, rooms)
    if left_nbytes:
        raise SwapFullError(
            f"a swap space of {capacity_nbytes} bytes was asked for, and {left_nbytes} of them have no room on "
            f"{len(drives)} drives together: " + "; ".join(str(error) for error in problems.values()),
            path=next(iter(problems.values())).path,
        )
    for number, problem in problems.items():
        _log.warning("%s: the other drives take what has no room there (%s)", drives[number].directory, problem)


def _shares(nbytes: int, speeds: Sequence[float]) -> list[int]:
    """Parts by speed, all but the last whole multiples of `_SHARE_NBYTES`; together no more than `nbytes`, in pages."""
    nbytes = align_up(nbytes, PAGE_NBYTES)
    shares, start, passed = [], 0, 0.0
    for number, speed in enumerate(speeds, start=1):
        passed += speed
        exact = nbytes if number == len(speeds) else math.ceil(nbytes * passed / sum(speeds))
        stop = min(nbytes, align_up(exact, _SHARE_NBYTES))
        shares.append(stop - start)
        start = stop
    return shares


def _spread(drives: Sequence[Drive], nbytes: int, rooms: dict[int, int]) -> int:
    """Make files longer by `nbytes` together, by free space; how much of it found no room."""
    total = sum(rooms.values())
    left_nbytes = nbytes
    # Twice: what rounding, or a neighbour that was faster, has left over goes wherever it fits.
    for turn in range(2):
        for number in sorted(rooms, key=lambda number: -rooms[number]):
            room_nbytes = align_down(drives[number].file.room_nbytes, PAGE_NBYTES)
            share_nbytes = left_nbytes if turn else align_up(nbytes * rooms[number] // max(1, total), PAGE_NBYTES)
            part_nbytes = min(left_nbytes, share_nbytes, room_nbytes)
            try:
                drives[number].file.grow(part_nbytes)
            except SwapFullError:
                continue
            left_nbytes -= part_nbytes
    return left_nbytes
