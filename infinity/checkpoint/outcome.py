"""A checkpoint that all ranks write, each by itself: complete on all of them, or on none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from infinity.bulletin import Bulletin
from infinity.errors import CheckpointError, RankError

_OUTCOME = "outcome"


class SharedOutcome:
    """How the ranks' parts of a checkpoint end, seen from one rank. Used by the thread that writes.

    Every rank but the first posts what it has written, or why it could not. The first one reads them all, writes
    the index, puts the folder in its place, and posts how that went; for this the others wait.

    Args:
        members: global ranks, by their numbers among those of the engine.
        what: is done, for messages.

    Attributes:
        on_progress: told that other ranks have moved.
    """

    def __init__(self, bulletin: Bulletin, member: int, members: Sequence[int], what: str) -> None:
        self._bulletin = bulletin
        self._member = member
        self._members = members
        self._what = what
        self.on_progress: Callable[[], None] = lambda: None
        self._has_posted = False

    def post(self, written: Mapping[str, Any]) -> None:
        """Tell the first rank what this one has written: something small that JSON can hold."""
        self._post({"written": written})

    def collect(self) -> list[dict[str, Any]]:
        """What the other ranks have written, in the order of their numbers; on the first one.

        Raises:
            CheckpointError: one of them could not.
            RankError: one of them is gone.
        """
        found: list[dict[str, Any]] = []
        for member in range(1, len(self._members)):
            said = json.loads(self._bulletin.read(f"{member}", member, self.on_progress))
            if "error" in said:
                raise CheckpointError(said["error"])
            found.append(said["written"])
        return found

    def end(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """The end of this rank's part, as of a context manager.

        Raises:
            CheckpointError: the first rank says that the checkpoint could not be written.
            RankError: it is gone.
        """
        if self._member == 0:
            self._bulletin.post(_OUTCOME, "" if error is None else self._told(error))
        elif error is None:
            if said := self._bulletin.read(_OUTCOME, 0, self.on_progress):
                raise CheckpointError(said)
        elif not self._has_posted and not isinstance(error, RankError):
            self._post({"error": self._told(error)})
            with suppress(RankError):  # the error is this rank's own; when it is told, nothing is left of the folder
                self._bulletin.read(_OUTCOME, 0, self.on_progress)

    def _post(self, said: Mapping[str, object]) -> None:
        self._bulletin.post(f"{self._member}", json.dumps(said))
        self._has_posted = True

    def _told(self, error: BaseException) -> str:
        if str(error).startswith(self._what):
            return str(error)  # another rank's, as it was told
        return f"{self._what} failed on rank {self._members[self._member]}: {type(error).__name__}: {error}"
