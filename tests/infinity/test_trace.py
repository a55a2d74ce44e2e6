"""The trace: a ring of spans from any thread, in a format that Chrome and Perfetto read."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.observe.trace import Trace, TraceEvent


def chrome(trace: Trace, folder: Path) -> dict[str, Any]:
    path = folder / "trace.json"
    trace.write_chrome(path)
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def in_thread(name: str, trace: Trace, *event: Any) -> None:
    thread = threading.Thread(target=trace.add, args=event, name=name)
    thread.start()
    thread.join()


def test_events_are_kept_in_order_with_their_thread() -> None:
    trace = Trace()
    trace.add("gather blocks.0", "gather", 10.0, 0.5)
    in_thread("reader", trace, "read blocks.1", "nvme", 10.25, 0.125)
    assert trace.events() == [
        TraceEvent("gather blocks.0", "gather", 10.0, 0.5, threading.current_thread().name),
        TraceEvent("read blocks.1", "nvme", 10.25, 0.125, "reader"),
    ]


@given(st.integers(1, 10), st.integers(0, 30))
def test_the_newest_events_are_kept(capacity: int, n: int) -> None:
    trace = Trace(capacity)
    for number in range(n):
        trace.add(str(number), "test", float(number), 1.0)
    assert [event.name for event in trace.events()] == [str(number) for number in range(max(n - capacity, 0), n)]


def test_the_ring_is_bounded_from_the_start() -> None:
    trace = Trace()
    for number in range(200_005):
        trace.add("x", "test", float(number), 0.0)
    assert len(trace.events()) == 200_000
    assert trace.events()[0].start_s == 5.0


def test_chrome_format(tmp_path: Path) -> None:
    trace = Trace()
    trace.add('gather "ä/0"', "gather", 100.5, 0.25)
    in_thread("reader", trace, "read", "nvme", 100.0, 0.75)
    main = threading.current_thread().name
    assert chrome(trace, tmp_path) == {
        "displayTimeUnit": "ms",
        "traceEvents": [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": main}},
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": 1, "args": {"name": "reader"}},
            {"name": 'gather "ä/0"', "cat": "gather", "ph": "X", "pid": 0, "tid": 0, "ts": 0.5e6, "dur": 0.25e6},
            {"name": "read", "cat": "nvme", "ph": "X", "pid": 0, "tid": 1, "ts": 0.0, "dur": 0.75e6},
        ],
    }


def test_times_start_at_zero_in_microseconds(tmp_path: Path) -> None:
    trace = Trace()
    for start_s in (5.0, 3.0, 4.0):
        trace.add("x", "test", start_s, 1.0)
    spans = [row for row in chrome(trace, tmp_path)["traceEvents"] if row["ph"] == "X"]
    assert [row["ts"] for row in spans] == [2e6, 0.0, 1e6]


def test_nothing_traced_is_still_a_trace(tmp_path: Path) -> None:
    assert chrome(Trace(), tmp_path)["traceEvents"] == []


def test_a_trace_may_be_read_while_threads_write(tmp_path: Path) -> None:
    trace = Trace(capacity=500)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            trace.add("x", "test", 0.0, 1.0)

    writers = [threading.Thread(target=write, name=f"writer {number}") for number in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(50):
            rows = chrome(trace, tmp_path)["traceEvents"]
            assert len([row for row in rows if row["ph"] == "X"]) <= 500
    finally:
        stop.set()
        for writer in writers:
            writer.join()


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Trace().write_chrome(tmp_path / "missing" / "trace.json")
