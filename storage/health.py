"""Which drives take new bytes: a drive that has no room, or on which a write failed, is left alone by later ones.

    OPEN     takes everything
    CROWDED  its file could not be made longer: what fits into the file is welcome, and every need for more asks again
    FULL     a write found no room: nothing is written there until `retry_full_s` later, when one write tries again
    FAILED   a write failed for another reason: nothing is written there while another drive has room

What such a drive holds is read as before. Each change for the worse is told once, as a warning.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from storage.errors import SwapFullError

_log = logging.getLogger(__name__)
DEFAULT_RETRY_FULL_S = 30.0  # soon enough for who frees space, rare enough for a disk that stays full


class DriveState(StrEnum):
    """What a drive is good for."""

    OPEN = "open"
    CROWDED = "crowded"
    FULL = "full"
    FAILED = "failed"


_ALLOWED = {
    DriveState.OPEN: {DriveState.CROWDED, DriveState.FULL, DriveState.FAILED},
    DriveState.CROWDED: {DriveState.OPEN, DriveState.FULL, DriveState.FAILED},
    DriveState.FULL: {DriveState.OPEN, DriveState.FAILED},
    DriveState.FAILED: set(),
}


@dataclass(slots=True)
class _Health:
    directory: Path
    state: DriveState = DriveState.OPEN
    cause: str = ""
    since_s: float = 0.0


class DriveHealth:
    """The states of the drives of one store, guarded by its lock.

    Args:
        directories: of the drives.
        now_s: the time, in seconds from any moment.
        retry_full_s: how long a drive without room is left alone.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        now_s: Callable[[], float] = time.monotonic,
        *,
        retry_full_s: float = DEFAULT_RETRY_FULL_S,
    ) -> None:
        self._drives = [_Health(directory) for directory in directories]
        self._retry_full_s = retry_full_s
        self._now_s = now_s

    def state(self, drive: int) -> DriveState:
        """What a drive is good for now."""
        return self._drives[drive].state

    def cause(self, drive: int) -> str:
        """Why a drive is not open; "" if it is."""
        return self._drives[drive].cause

    def describe(self, drive: int) -> str:
        """What to say about a drive behind its name; "" if it is open."""
        one = self._drives[drive]
        return "" if one.state is DriveState.OPEN else f" ({one.state}: {one.cause})"

    @property
    def is_any_full(self) -> bool:
        """Whether one of the drives has no room and is left alone."""
        return any(one.state is DriveState.FULL for one in self._drives)

    def takes_writes(self, drive: int) -> bool:
        """Whether a write there is likely to succeed, or due to be tried again."""
        one = self._drives[drive]
        if one.state is DriveState.FULL:
            return self._now_s() - one.since_s >= self._retry_full_s
        return one.state is not DriveState.FAILED

    def may_grow(self, drive: int) -> bool:
        """Whether making the file longer is worth an attempt that nothing depends on."""
        one = self._drives[drive]
        return one.state is DriveState.OPEN or self._now_s() - one.since_s >= self._retry_full_s

    def note_crowded(self, drive: int, error: Exception) -> None:
        """The file could not be made longer."""
        if self.state(drive) in (DriveState.OPEN, DriveState.CROWDED):
            self._change(drive, DriveState.CROWDED, str(error))

    def note_grown(self, drive: int) -> None:
        """The file was made longer."""
        if self.state(drive) is DriveState.CROWDED:
            self._change(drive, DriveState.OPEN, "")

    def note_failure(self, drive: int, error: BaseException) -> None:
        """A write failed."""
        if self.state(drive) is not DriveState.FAILED:
            is_full = isinstance(error, SwapFullError)
            self._change(drive, DriveState.FULL if is_full else DriveState.FAILED, str(error))

    def note_written(self, drive: int) -> None:
        """A write succeeded."""
        if self.state(drive) is DriveState.FULL:
            self._change(drive, DriveState.OPEN, "")

    def _change(self, drive: int, state: DriveState, cause: str) -> None:
        one = self._drives[drive]
        if state is not one.state:
            if state not in _ALLOWED[one.state]:
                raise RuntimeError(f"{one.directory} is {one.state} ({one.cause}) and cannot become {state}")
            if state is DriveState.OPEN:
                _log.info("%s has room again and is used as before", one.directory)
            elif len(self._drives) > 1:
                _log.warning("%s takes no new bytes, which go to other drives from now on: %s", one.directory, cause)
            one.state = state
        one.cause, one.since_s = cause, self._now_s()
