"""A ring of timed events of the whole engine. `infinity.observe.chrome` writes it for Chrome and Perfetto."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch.profiler import record_function

from infinity.observe.chrome import HELD, write_chrome
from infinity.observe.stalls import Stall
from storage.paths import StrPath

_CAPACITY = 50_000
_EVENT_NBYTES = 200  # a tuple and three numbers; names and tracks are shared


class TraceEvent(NamedTuple):
    """One span, or what a tier held at a moment. Times in seconds on `time.perf_counter`'s clock.

    Attributes:
        name: of a unit, a shard or a cause; of a tier.
        category: what happened: "gather", "stall", "optimizer", "read", ... "held" is what a tier held.
        track: the thread, the drive or the link it happened on.
        nbytes: how much was moved or held; 0 where that says nothing.
        detail: more about it; for a stall what was waited for.
    """

    name: str
    category: str
    start_s: float
    duration_s: float
    track: str
    nbytes: int = 0
    detail: str = ""


def profiled(name: str, category: str) -> record_function:
    """A range that torch's profiler shows, as `infinity::CATEGORY NAME`."""
    return record_function(f"infinity::{category} {name}")


class Trace:
    """Keeps the newest events. Appending is one deque operation, from any thread."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._events: deque[TraceEvent] = deque(maxlen=capacity)

    def add(
        self,
        name: str,
        category: str,
        start_s: float,
        duration_s: float,
        track: str | None = None,
        *,
        nbytes: int = 0,
        detail: str = "",
    ) -> None:
        """Note a span; without a track it belongs to the calling thread."""
        track = threading.current_thread().name if track is None else track
        self._events.append(TraceEvent(name, category, start_s, duration_s, track, nbytes, detail))

    def held(self, tier: str, nbytes: int) -> None:
        """Note what a tier holds now."""
        self._events.append(TraceEvent(tier, HELD, time.perf_counter(), 0.0, tier, nbytes))

    def add_stall(self, stall: Stall) -> None:
        """Note a wait of the training thread."""
        self.add(stall.cause.value, "stall", stall.start_s, stall.duration_s, detail=stall.waited_for)

    @contextmanager
    def phase(self, name: str, category: str) -> Iterator[None]:
        """Note what the block takes; torch's profiler shows it as `infinity::CATEGORY NAME`."""
        with profiled(name, category):
            start_s = time.perf_counter()
            try:
                yield
            finally:
                self.add(name, category, start_s, time.perf_counter() - start_s)

    def events(self) -> list[TraceEvent]:
        """What has been noted, the oldest first."""
        return list(self._events)

    @property
    def nbytes(self) -> int:
        """About what the events hold; outside every budget."""
        return len(self._events) * _EVENT_NBYTES

    def write_chrome(self, path: StrPath) -> None:
        """Write the events in Chrome's trace format (chrome://tracing, Perfetto).

        Raises:
            OSError: the file cannot be written; one that was there before is as it was.
        """
        write_chrome(self.events(), path)
