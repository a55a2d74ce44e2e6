"""The contract of an I/O backend.

What the store guarantees: `memory` is page aligned and stays valid until the ticket completes; offset and length are
multiples of 4 KiB and lie inside the file; no two requests in flight overlap unless both are reads.

What a backend owes: `submit` never blocks on I/O; every ticket completes exactly once, with the system's error if there
was one, also when the backend is closed first; short transfers are resumed; demand reads overtake everything; a
request's `check` is called, on a thread of the backend, for every part of its memory that has moved, exactly once.
Callbacks of tickets run on threads that serve others too: they may submit, promote and close, and never
wait for I/O.
"""

from __future__ import annotations

from typing import Protocol

from storage.backends.cost import IoCost
from storage.types import IoRequest


class Backend(Protocol):
    """Moves bytes between memory and files."""

    @property
    def name(self) -> str:
        """Short name for reports: "direct", "buffered", …"""

    @property
    def progress(self) -> int:
        """Grows with every block that completes."""

    @property
    def opens_direct(self) -> bool:
        """Whether the files it is given have to be opened with O_DIRECT."""

    @property
    def cost(self) -> IoCost:
        """CPU time of the threads that move blocks, until now."""

    def submit(self, request: IoRequest) -> None:
        """Start a transfer; its ticket tells how it ends."""

    def promote(self, key: str) -> None:
        """Somebody begins to wait for the transfers of a key that were submitted: from now on they go first."""

    def in_flight(self) -> list[IoRequest]:
        """What was submitted and has not completed, for reports."""

    def close(self) -> None:
        """Finish what is in service, fail what is queued with ClosedError, join threads. Idempotent, bounded."""
