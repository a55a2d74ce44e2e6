"""Chrome's trace format of a run, which Perfetto opens: a process for each place, a track for each kind of work.

Source: "Trace Event Format" of the Chromium project; complete events ("X"), metadata ("M") and flows ("s", "t", "f").

[Note: lanes]
Complete events of one track must be nested or apart. Transfers of a drive overlap, so they are dealt out to as many
lanes as there are at a time.

[Note: arrows]
A shard's way is drawn by what is known of it without extra bookkeeping: its name. Parameters: a read, then the gather
that uses it. State: a read, then the update, then the write. An arrow goes from the last of the sources that ended
before its target did.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity.observe.trace import TraceEvent

TRANSFERS = ("read", "write")
_PLACES = {
    "forward": ("training thread", "units"),
    "backward": ("training thread", "units"),
    "gather": ("training thread", "engine"),
    "gradient": ("training thread", "engine"),
    "step": ("training thread", "engine"),
    "stall": ("training thread", "stalls"),
    "optimizer": ("optimizer", "updates"),
}
_ARROWS = (("read", "gather"), ("read", "optimizer"), ("optimizer", "write"))


def write_chrome(events: Sequence[TraceEvent], path: Path) -> None:
    """Write a file for chrome://tracing or https://ui.perfetto.dev."""
    path.write_text(json.dumps({"traceEvents": chrome_rows(events), "displayTimeUnit": "ms"}))


def chrome_rows(events: Sequence[TraceEvent]) -> list[dict[str, Any]]:
    """The rows of the format; times in microseconds since the first event."""
    origin_s = min((event.start_s for event in events), default=0.0)
    places = _places(events)
    processes = {name: number for number, name in enumerate(dict.fromkeys(place for place, _ in places), start=1)}
    tracks = {place: number for number, place in enumerate(dict.fromkeys(places), start=1)}
    rows: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": number, "tid": 0, "args": {"name": name}}
        for name, number in processes.items()
    ]
    rows += [
        {"name": "thread_name", "ph": "M", "pid": processes[place], "tid": number, "args": {"name": track}}
        for (place, track), number in tracks.items()
    ]
    spans = [
        {
            "name": event.name,
            "cat": event.category,
            "ph": "X",
            "pid": processes[place[0]],
            "tid": tracks[place],
            "ts": (event.start_s - origin_s) * 1e6,
            "dur": event.duration_s * 1e6,
        }
        for event, place in zip(events, places, strict=True)
    ]
    return rows + spans + _arrows(events, spans)


def _places(events: Sequence[TraceEvent]) -> list[tuple[str, str]]:
    """Process and track of every event."""
    places: list[tuple[str, str] | None] = [None] * len(events)
    overlapping: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, event in enumerate(events):
        if event.category in TRANSFERS:
            overlapping[event.track, event.category].append(number)
        else:
            places[number] = _PLACES.get(event.category, (event.track, event.category))
    for (drive, category), numbers in overlapping.items():
        for number, lane in zip(numbers, _lanes([events[n] for n in numbers]), strict=True):
            places[number] = (drive, f"{category} {lane}")
    return [place for place in places if place is not None]


def _lanes(events: Sequence[TraceEvent]) -> list[int]:
    """A lane for each event, so that those of one lane do not overlap: the lowest that is free when it starts."""
    lanes = [0] * len(events)
    free_s: list[float] = []
    for number in sorted(range(len(events)), key=lambda n: events[n].start_s):
        event = events[number]
        lane = next((at for at, end_s in enumerate(free_s) if end_s <= event.start_s), len(free_s))
        free_s[lane : lane + 1] = [event.start_s + event.duration_s]
        lanes[number] = lane + 1
    return lanes


def _arrows(events: Sequence[TraceEvent], spans: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Flows between the spans of a shard; see [Note: arrows]."""
    by_category: dict[str, list[int]] = defaultdict(list)
    for number, event in enumerate(events):
        by_category[event.category].append(number)
    rows: list[dict[str, Any]] = []
    for source, target in _ARROWS:
        for before, after in _pairs(events, by_category[source], by_category[target]):
            flow = {"name": f"{source} → {target}", "cat": "shard", "id": len(rows) // 2 + 1}
            leaving, entering = spans[before], spans[after]
            rows.append(flow | _end_of(leaving) | {"ph": "s"})
            rows.append(flow | {key: entering[key] for key in ("pid", "tid", "ts")} | {"ph": "f", "bp": "e"})
    return rows


def _end_of(span: dict[str, Any]) -> dict[str, Any]:
    """Inside the span: a flow binds to the slice that contains its moment."""
    return {"pid": span["pid"], "tid": span["tid"], "ts": span["ts"] + span["dur"] * 0.999}


def _pairs(events: Sequence[TraceEvent], sources: Iterable[int], targets: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Each target with the last source of its name that ended before the target did and is not taken yet."""
    ended: dict[str, list[int]] = defaultdict(list)
    for number in sorted(sources, key=lambda n: events[n].start_s + events[n].duration_s):
        ended[events[number].name].append(number)
    for target in sorted(targets, key=lambda n: events[n].start_s):
        end_s = events[target].start_s + events[target].duration_s
        candidates = ended.get(events[target].name, [])
        earlier = [n for n in candidates if events[n].start_s + events[n].duration_s <= end_s]
        if earlier:
            yield earlier[-1], target
            del candidates[: len(earlier)]
