"""A ring of timed events, and Chrome's trace format made of it."""

from __future__ import annotations

import json
import threading
from collections import deque
from pathlib import Path
from typing import NamedTuple

_CAPACITY = 200_000


class TraceEvent(NamedTuple):
    """One span. Times in seconds on `time.perf_counter`'s clock."""

    name: str
    category: str
    start_s: float
    duration_s: float
    thread: str


class Trace:
    """Keeps the newest events. Appending is one deque operation, from any thread."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._events: deque[TraceEvent] = deque(maxlen=capacity)

    def add(self, name: str, category: str, start_s: float, duration_s: float) -> None:
        self._events.append(TraceEvent(name, category, start_s, duration_s, threading.current_thread().name))

    def events(self) -> list[TraceEvent]:
        return list(self._events)

    def write_chrome(self, path: Path) -> None:
        """Write the events in Chrome's trace format (chrome://tracing, Perfetto)."""
        events = self.events()
        origin_s = min((event.start_s for event in events), default=0.0)
        threads = {name: number for number, name in enumerate(dict.fromkeys(event.thread for event in events))}
        rows: list[dict[str, object]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": name}}
            for name, number in threads.items()
        ]
        rows += [
            {
                "name": event.name,
                "cat": event.category,
                "ph": "X",
                "pid": 0,
                "tid": threads[event.thread],
                "ts": (event.start_s - origin_s) * 1e6,
                "dur": event.duration_s * 1e6,
            }
            for event in events
        ]
        path.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))
