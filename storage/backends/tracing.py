"""Tells when each transfer was under way: from the moment it was submitted to its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from storage.backends.base import Backend
from storage.backends.wrapper import BackendWrapper
from storage.types import IoRequest, Op, Ticket


@dataclass(frozen=True, slots=True)
class TransferSpan:
    """A transfer that has ended well. Times on `time.perf_counter`'s clock.

    Attributes:
        key: what was moved.
        directory: of the swap file.
        nbytes: padding included.
    """

    op: Op
    key: str
    directory: str
    nbytes: int
    start_s: float
    end_s: float


class TracingBackend(BackendWrapper):
    """Passes everything on to `inner`, and calls `on_transfer` in the completing thread. Closes `inner`."""

    def __init__(self, inner: Backend, on_transfer: Callable[[TransferSpan], None]) -> None:
        super().__init__(inner)
        self._on_transfer = on_transfer
        self._directories: dict[str, str] = {}  # by path of a swap file, which lies in a folder of its run

    def submit(self, request: IoRequest) -> None:
        start_s = time.perf_counter()

        def ended(ticket: Ticket) -> None:
            if ticket.exception is not None:
                return
            directory = self._directories.get(request.path)
            if directory is None:
                directory = self._directories[request.path] = str(Path(request.path).parents[1])
            self._on_transfer(
                TransferSpan(request.op, request.key, directory, len(request.memory), start_s, time.perf_counter())
            )

        request.ticket.add_done_callback(ended)
        self._inner.submit(request)
