"""Chrome's trace format of a run, which Perfetto opens: a process for each place, a track for each kind of work.

Source: "Trace Event Format" of the Chromium project; complete events ("X"), counters ("C"), metadata ("M") and flows
("s", "f").

[Note: lanes]
Complete events of one track must be nested or apart. Transfers of a drive or of the link overlap, so they are dealt out
to as many lanes as there are at a time.

[Note: arrows]
A shard's way is drawn by what is known of it without extra bookkeeping: its name, and the unit that the name begins
with. Parameters: a read, the upload, the computation of the unit. Gradients: the backward of the unit, the download,
the update. State: a read, then the update, then the write. An arrow goes from the last of the sources that ended before
its target did.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from infinity.replacing import replaced_file
from storage.paths import StrPath

if TYPE_CHECKING:
    from infinity.observe.trace import TraceEvent

TRANSFERS = ("read", "write", "h2d", "d2h")
HELD = "held"
"""The category of what a tier holds at a moment."""
_PLACES = {
    "forward": ("training thread", "units"),
    "backward": ("training thread", "units"),
    "gather": ("training thread", "engine"),
    "gradient": ("training thread", "engine"),
    "step": ("training thread", "engine"),
    "use forward": ("training thread", "order of use"),
    "use backward": ("training thread", "order of use"),
    "stall": ("training thread", "stalls"),
    "optimizer": ("optimizer", "updates"),
}
_LANE_NAMES = {"h2d": "host to device", "d2h": "device to host"}
_OF_A_SHARD = (("read", "h2d"), ("read", "optimizer"), ("optimizer", "write"))
_OF_A_UNIT = (("h2d", "forward"), ("h2d", "backward"), ("backward", "d2h"), ("d2h", "optimizer"))
_SHOWN = {"h2d": "upload", "d2h": "download", "optimizer": "update", "forward": "compute", "backward": "compute"}


def write_chrome(events: Sequence[TraceEvent], path: StrPath) -> None:
    """Write a file for chrome://tracing or https://ui.perfetto.dev, row by row: all of them would be megabytes.

    Raises:
        OSError: it cannot be written; a file that was there before is as it was.
    """
    with replaced_file(path) as file:
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
        at_us = (event.start_s - origin_s) * 1e6
        if event.category == HELD:
            held = {"cat": HELD, "ph": "C", "ts": at_us, "args": {"bytes": event.nbytes}}
            yield {"name": f"{event.name} bytes"} | place_of(number) | held
            continue
        span = {"name": event.name, "cat": event.category, "ph": "X", **place_of(number), "ts": at_us}
        yield span | {"dur": event.duration_s * 1e6} | _arguments(event)
    for flow, (kind, before, after) in enumerate(_arrows(events), start=1):
        arrow = {"name": kind, "cat": "shard", "id": flow}
        leaving, entering = events[before], events[after]
        # A flow binds to the slice that contains its moment, so it leaves a little before the end; and never goes back.
        left_s = min(leaving.start_s + leaving.duration_s * 0.999, entering.start_s)
        yield arrow | place_of(before) | {"ts": (left_s - origin_s) * 1e6, "ph": "s"}
        yield arrow | place_of(after) | {"ts": (entering.start_s - origin_s) * 1e6, "ph": "f", "bp": "e"}


def _arguments(event: TraceEvent) -> dict[str, Any]:
    """What a viewer shows of a span that is selected."""
    arguments: dict[str, Any] = {}
    if event.nbytes:
        arguments["bytes"] = event.nbytes
    if event.detail:
        arguments["waited for"] = event.detail
    return {"args": arguments} if arguments else {}


def _places(events: Sequence[TraceEvent]) -> list[tuple[str, str]]:
    """Process and track of every event."""
    places: list[tuple[str, str] | None] = [None] * len(events)
    overlapping: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, event in enumerate(events):
        if event.category in TRANSFERS:
            overlapping[event.track, event.category].append(number)
        elif event.category == HELD:
            places[number] = ("tiers", event.name)
        else:
            places[number] = _PLACES.get(event.category, (event.track, event.category))
    for (place, category), numbers in overlapping.items():
        name = _LANE_NAMES.get(category, category)
        times = [(events[n].start_s, events[n].start_s + events[n].duration_s) for n in numbers]
        for number, lane in zip(numbers, lanes_apart(times), strict=True):
            places[number] = (place, f"{name} {lane}")
    return [place for place in places if place is not None]


def lanes_apart(times: Sequence[tuple[float, float]]) -> list[int]:
    """A lane for each span, given by its start and end, so that those of one lane do not overlap.

    It is the lowest one that is free when the span starts, from 1.
    """
    lanes = [0] * len(times)
    free_s: list[float] = []
    for number in sorted(range(len(times)), key=lambda n: times[n]):
        start_s, end_s = times[number]
        lane = next((at for at, last_s in enumerate(free_s) if last_s <= start_s), len(free_s))
        free_s[lane : lane + 1] = [end_s]
        lanes[number] = lane + 1
    return lanes


def _arrows(events: Sequence[TraceEvent]) -> Iterator[tuple[str, int, int]]:
    """What flows from which event to which; see [Note: arrows]."""
    by_category: dict[str, list[int]] = defaultdict(list)
    for number, event in enumerate(events):
        by_category[event.category].append(number)
    units = {events[n].name for category in ("forward", "backward") for n in by_category[category]}
    subjects: list[tuple[Sequence[tuple[str, str]], Callable[[str], str]]] = [
        (_OF_A_SHARD, lambda name: name),
        (_OF_A_UNIT, lambda name: _unit_in(name, units)),
    ]
    for pairs, subject in subjects:
        for source, target in pairs:
            kind = f"{_SHOWN.get(source, source)} → {_SHOWN.get(target, target)}"
            for before, after in _pairs(events, by_category[source], by_category[target], subject):
                yield kind, before, after


def _unit_in(name: str, units: set[str]) -> str:
    """The unit that a shard or a parameter belongs to: the longest beginning of its name that is one."""
    unit = name.partition("/")[0]
    while unit not in units and "." in unit:
        unit = unit.rpartition(".")[0]
    return unit


def _pairs(
    events: Sequence[TraceEvent], sources: Iterable[int], targets: Iterable[int], subject: Callable[[str], str]
) -> Iterator[tuple[int, int]]:
    """Each target with the last source of its subject that began and ended before the target did and is not taken yet.

    The ends of both are noted by different threads, so a source may seem to end a moment after its target began.
    """
    ended: dict[str, list[int]] = defaultdict(list)
    for number in sorted(sources, key=lambda n: events[n].start_s + events[n].duration_s):
        ended[subject(events[number].name)].append(number)
    for target in sorted(targets, key=lambda n: events[n].start_s):
        start_s, end_s = events[target].start_s, events[target].start_s + events[target].duration_s
        candidates = ended.get(subject(events[target].name), [])
        earlier = [
            n for n in candidates if events[n].start_s <= start_s and events[n].start_s + events[n].duration_s <= end_s
        ]
        if earlier:
            yield earlier[-1], target
            del candidates[: candidates.index(earlier[-1]) + 1]
