"""What ranks tell each other without meeting: notes in the job's store, which others look up.

Collectives are issued by the training thread alone. What goes on behind it, such as a checkpoint that all ranks write
together, is agreed on by notes: a rank posts its own and looks, now and then, whether those of others are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from infinity.errors import RankError

_POLL_S = 0.01
_TICK_S = 1.0


class Bulletin:
    """The notes of one matter among the ranks of an engine. Used by one thread at a time.

    Args:
        store: a part of the job's store of its own, the same on all ranks.
        refuse_gone: raises RankError when a member takes part in nothing any more.
        timeout_s: how long a note may take while nothing moves on any rank.
    """

    def __init__(self, store: Store, refuse_gone: Callable[[int], None], timeout_s: float) -> None:
        self._store = store
        self._refuse_gone = refuse_gone
        self._timeout_s = timeout_s
        self._ticked_s = time.monotonic()

    def post(self, name: str, text: str) -> None:
        """Make a note.

        Raises:
            RankError: the process that keeps the job's store has gone.
        """
        try:
            self._store.set(name, text)
        except RuntimeError as error:
            raise _store_gone(error) from error

    def tick(self) -> None:
        """Let the others know, now and then, that something moves here."""
        now_s = time.monotonic()
        if now_s - self._ticked_s >= _TICK_S:
            self._ticked_s = now_s
            self._ticks(1)

    def read(self, name: str, member: int, on_progress: Callable[[], None]) -> str:
        """The note of that name, when it is there.

        Args:
            member: who makes it.
            on_progress: told that something has moved on another rank.

        Raises:
            RankError: that rank is gone, or nothing has moved for too long.
        """
        ticks, moved_s = self._ticks(0), time.monotonic()
        while (text := self._look(name)) is None:
            self._refuse_missing(name, member)
            now, now_s = self._ticks(0), time.monotonic()
            if now != ticks:
                ticks, moved_s = now, now_s
                on_progress()
            elif now_s - moved_s >= self._timeout_s:
                raise RankError(f"nothing has moved on other ranks for {self._timeout_s:g} s (rank_timeout_s)")
            time.sleep(_POLL_S)
        return text

    def _look(self, name: str) -> str | None:
        try:
            return self._store.get(name).decode() if self._store.check([name]) else None
        except RuntimeError as error:
            raise _store_gone(error) from error

    def _refuse_missing(self, name: str, member: int) -> None:
        try:
            self._refuse_gone(member)
        except RankError:
            if self._look(name) is None:  # it may have been made just before
                raise

    def _ticks(self, more: int) -> int:
        try:
            return int(self._store.add("ticks", more))
        except RuntimeError as error:
            raise _store_gone(error) from error


def _store_gone(error: RuntimeError) -> RankError:
    said = (str(error).splitlines() or [repr(error)])[0]
    return RankError(f"the process that keeps the store of this job has gone; see the other ranks' output ({said})")
