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
from collections.abc import Iterable, Iterator, Sequence
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
    """Write a file for chrome://tracing or https://ui.perfetto.dev, row by row: all of them would be megabytes."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"traceEvents": [')
        for number, row in enumerate(chrome_rows(events)):
            file.write((",\n" if number else "\n") + json.dumps(row))
        file.write('\n], "displayTimeUnit": "ms"}\n')


def chrome_rows(events: Sequence[TraceEvent]) -> Iterator[dict[str, Any]]:
    """The rows of the format; times in microseconds since the first event."""
    origin_s = min((event.start_s for event in events), default=0.0)
    places = _places(events)
    processes = {name: number for number, name in enumerate(dict.fromkeys(place for place, _ in places), start=1)}
    tracks = {place: number for number, place in enumerate(dict.fromkeys(places), start=1)}

    def place_of(number: int) -> dict[str, int]:
        place = places[number]
        return {"pid": processes[place[0]], "tid": tracks[place]}

    for name, process in processes.items():
        yield {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}
    for (place, track), number in tracks.items():
        yield {"name": "thread_name", "ph": "M", "pid": processes[place], "tid": number, "args": {"name": track}}
    for number, event in enumerate(events):
        yield {
            "name": event.name,
            "cat": event.category,
            "ph": "X",
            **place_of(number),
            "ts": (event.start_s - origin_s) * 1e6,
            "dur": event.duration_s * 1e6,
        }
    for flow, (kind, before, after) in enumerate(_arrows(events), start=1):
        arrow = {"name": kind, "cat": "shard", "id": flow}
        leaving, entering = events[before], events[after]
        # A flow binds to the slice that contains its moment, so it leaves a little before the end.
        left_s = leaving.start_s + leaving.duration_s * 0.999 - origin_s
        yield arrow | place_of(before) | {"ts": left_s * 1e6, "ph": "s"}
        yield arrow | place_of(after) | {"ts": (entering.start_s - origin_s) * 1e6, "ph": "f", "bp": "e"}


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


def _arrows(events: Sequence[TraceEvent]) -> Iterator[tuple[str, int, int]]:
    """What flows from which event to which; see [Note: arrows]."""
    by_category: dict[str, list[int]] = defaultdict(list)
    for number, event in enumerate(events):
        by_category[event.category].append(number)
    for source, target in _ARROWS:
        for before, after in _pairs(events, by_category[source], by_category[target]):
            yield f"{source} → {target}", before, after


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
