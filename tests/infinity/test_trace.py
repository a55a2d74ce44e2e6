"""The trace: a ring of spans from any thread, in a format that Chrome and Perfetto read."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import infinity
from infinity.observe.chrome import chrome_rows
from infinity.observe.trace import Trace, TraceEvent
from tests.infinity import chrome_format


def chrome(trace: Trace, folder: Path) -> dict[str, Any]:
    path = folder / "trace.json"
    trace.write_chrome(path)
    loaded: dict[str, Any] = json.loads(path.read_text())
    chrome_format.check(loaded)
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
    for number in range(50_005):
        trace.add("x", "test", float(number), 0.0)
    assert len(trace.events()) == 50_000
    assert trace.events()[0].start_s == 5.0


def test_chrome_format(tmp_path: Path) -> None:
    trace = Trace()
    trace.add('blocks "ä/0"', "gather", 100.5, 0.25)
    in_thread("other", trace, "work", "custom", 100.0, 0.75)
    assert chrome(trace, tmp_path) == {
        "displayTimeUnit": "ms",
        "traceEvents": [
            {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "training thread"}},
            {"name": "process_name", "ph": "M", "pid": 2, "tid": 0, "args": {"name": "other"}},
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "engine"}},
            {"name": "thread_name", "ph": "M", "pid": 2, "tid": 2, "args": {"name": "custom"}},
            {"name": 'blocks "ä/0"', "cat": "gather", "ph": "X", "pid": 1, "tid": 1, "ts": 0.5e6, "dur": 0.25e6},
            {"name": "work", "cat": "custom", "ph": "X", "pid": 2, "tid": 2, "ts": 0.0, "dur": 0.75e6},
        ],
    }


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=30))
def test_transfers_that_overlap_get_lanes_of_their_own(times: list[tuple[int, int]]) -> None:
    events = [TraceEvent(str(n), "read", float(start), float(long), "/nvme0") for n, (start, long) in enumerate(times)]
    rows = list(chrome_rows(events))
    assert chrome_format.overlaps(rows) == []
    most_at_a_time = max((sum(s <= at < s + d for s, d in times) for at, _ in times), default=0)
    lanes = {row["args"]["name"] for row in rows if row["ph"] == "M" and row["name"] == "thread_name"}
    assert lanes == {f"read {number + 1}" for number in range(most_at_a_time)}


def test_arrows_follow_a_shard_from_read_to_write() -> None:
    events = [
        TraceEvent("blocks.1/fp32", "read", 0.0, 1.0, "/nvme0"),
        TraceEvent("blocks.0/fp32", "read", 0.0, 9.0, "/nvme0"),  # of another shard
        TraceEvent("blocks.1/fp32", "h2d", 1.0, 1.0, "link"),
        TraceEvent("blocks.1", "backward", 2.0, 2.0, "MainThread"),
        TraceEvent("blocks.1.mlp.weight", "d2h", 4.0, 1.0, "link"),
        TraceEvent("blocks.1/fp32/state0", "read", 3.0, 1.0, "/nvme0"),
        TraceEvent("blocks.1/fp32/state0", "optimizer", 5.0, 1.0, "worker"),
        TraceEvent("blocks.1/fp32/state0", "write", 6.5, 1.0, "/nvme0"),
        TraceEvent("blocks.10", "forward", 8.0, 1.0, "MainThread"),  # not blocks.1, and nothing was uploaded for it
    ]
    rows = list(chrome_rows(events))
    flows = [row for row in rows if row["ph"] in "sf"]
    assert [row["name"] for row in flows if row["ph"] == "s"] == [
        "read → upload",
        "read → update",
        "update → write",
        "upload → compute",
        "compute → download",
        "download → update",
    ]
    assert [row["id"] for row in flows if row["ph"] == "s"] == [row["id"] for row in flows if row["ph"] == "f"]
    spans = [row for row in rows if row["ph"] == "X"]
    assert [row["name"] for row in spans] == [event.name for event in events]
    for row in flows:  # each end lies in a slice of its track
        inside = [s for s in spans if s["tid"] == row["tid"] and s["ts"] <= row["ts"] <= s["ts"] + s["dur"]]
        assert inside


def test_what_a_tier_holds_is_a_counter_and_what_is_waited_for_is_told(tmp_path: Path) -> None:
    trace = Trace()
    trace.held("host", 4096)
    trace.add("nvme_read", "stall", 1.0, 0.5, detail="demand of blocks.3")
    trace.add("blocks.3", "h2d", 1.0, 0.5, "link", nbytes=512)
    rows = chrome(trace, tmp_path)["traceEvents"]
    assert [(row["name"], row["args"]) for row in rows if row["ph"] == "C"] == [("host bytes", {"bytes": 4096})]
    assert [row["args"] for row in rows if row["ph"] == "X"] == [{"waited for": "demand of blocks.3"}, {"bytes": 512}]
    named = {row["args"]["name"] for row in rows if row["ph"] == "M"}
    assert named == {"tiers", "host", "training thread", "stalls", "link", "host to device 1"}


def test_a_run_shows_units_engine_updates_and_drives(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    (tmp_path / "swap").mkdir()
    config = infinity.Config(
        precision="fp32",
        device={"kind": "cpu", "budget": "1MiB"},
        host={"budget": "300KiB"},
        nvme={"paths": [tmp_path / "swap"]},
        resident_threshold=0,
    )
    with infinity.offload(model, config) as engine:
        optimizer = infinity.AdamW(model.parameters())
        with torch.profiler.profile() as profile:
            for _ in range(3):
                model(torch.ones(2, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        engine.metrics()
        rows = chrome(engine.trace, tmp_path)["traceEvents"]
        moved = engine.counters()
        transfers = [event for event in engine.trace.events() if event.category in ("read", "write")]
    assert chrome_format.overlaps(rows) == []
    named = {row["args"]["name"] for row in rows if row["ph"] == "M"}
    assert {"training thread", "units", "engine", "optimizer", "updates", str(tmp_path / "swap")} <= named
    assert {"read 1", "write 1"} <= named
    forwards = [row["name"] for row in rows if row.get("cat") == "forward"]
    assert forwards == ["0", "1", "2", "3"] * 3
    assert sorted(row["name"] for row in rows if row.get("cat") == "backward") == sorted(forwards)
    assert [row["name"] for row in rows if row.get("cat") == "step"] == ["0", "1", "2"]
    arrows = {row["name"] for row in rows if row["ph"] == "s"}
    ways = {"read → upload", "upload → compute", "compute → download", "download → update"}
    assert arrows == ways | {"read → update", "update → write"}
    assert {"link", "host to device 1", "device to host 1", "tiers", "device", "host", "nvme"} <= named
    assert {row["name"] for row in rows if row["ph"] == "C"} == {"device bytes", "host bytes", "nvme bytes"}
    crossed = {
        way: sum(row.get("args", {}).get("bytes", 0) for row in rows if row.get("cat") == way) for way in ("h2d", "d2h")
    }
    assert crossed == {way: moved[f"link/{way}_bytes"] for way in ("h2d", "d2h")}
    assert all(row["args"]["waited for"] for row in rows if row.get("cat") == "stall")
    n_of = {op: sum(event.category == op for event in transfers) for op in ("read", "write")}
    assert n_of == {op: moved[f"nvme/{op}_operations"] for op in n_of}
    profiled = {event.key: event.count for event in profile.key_averages()}
    assert {"infinity::gather 0/float32", "infinity::gradient 3/float32", "infinity::step 0"} <= profiled.keys()
    assert {name: profiled.get(f"infinity::forward {name}") for name in "0123"} == dict.fromkeys("0123", 3)
    events = profile.events()
    assert events is not None
    inner = {child.name for event in events if event.name == "infinity::forward 1" for child in event.cpu_children}
    assert "aten::linear" in inner


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
