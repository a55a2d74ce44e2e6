"""Chrome's "Trace Event Format" as strict models, as far as a trace of this engine uses it.

Source: the document of that name of the Chromium project: which fields each phase ("ph") has, that times are
microseconds, that flows begin before they end and bind to slices. A row with a field that its phase does not know is
refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1)
    pid: PositiveInt
    tid: NonNegativeInt


class NameOf(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1)


class Metadata(_Row):
    """Names a process or a thread."""

    ph: Literal["M"]
    name: Literal["process_name", "thread_name"]
    args: NameOf


class Complete(_Row):
    """A slice of a track."""

    ph: Literal["X"]
    cat: str = Field(min_length=1)
    ts: NonNegativeFloat
    dur: NonNegativeFloat
    args: dict[str, str | int] = Field(default_factory=dict)


class CounterValue(_Row):
    """A value at a moment; viewers draw a track of its own."""

    ph: Literal["C"]
    cat: str
    ts: NonNegativeFloat
    args: dict[str, NonNegativeInt] = Field(min_length=1)


class FlowStart(_Row):
    """Where an arrow leaves: a moment inside a slice."""

    ph: Literal["s"]
    cat: str
    id: PositiveInt
    ts: NonNegativeFloat


class FlowEnd(_Row):
    """Where it arrives; "bp": "e" binds it to the slice that holds the moment."""

    ph: Literal["f"]
    cat: str
    id: PositiveInt
    ts: NonNegativeFloat
    bp: Literal["e"]


Row = Annotated[Metadata | Complete | CounterValue | FlowStart | FlowEnd, Field(discriminator="ph")]


class TraceFile(BaseModel):
    """The object form of the format."""

    model_config = ConfigDict(extra="forbid", strict=True)

    rows: list[Row] = Field(alias="traceEvents")
    unit: Literal["ms", "ns"] = Field(alias="displayTimeUnit")


def check(file: dict[str, Any]) -> TraceFile:
    """The file as models; raises what is wrong with it, also where rows contradict each other."""
    trace = TraceFile.model_validate(file)
    rows = trace.rows
    processes = {row.pid for row in rows if isinstance(row, Metadata) and row.name == "process_name"}
    threads = {(row.pid, row.tid) for row in rows if isinstance(row, Metadata) and row.name == "thread_name"}
    slices: dict[tuple[int, int], list[Complete]] = {}
    for row in rows:
        if not isinstance(row, Metadata):
            assert row.pid in processes, f"{row}: its process has no name"
            assert (row.pid, row.tid) in threads, f"{row}: its track has no name"
        if isinstance(row, Complete):
            slices.setdefault((row.pid, row.tid), []).append(row)
    starts = {row.id: row for row in rows if isinstance(row, FlowStart)}
    ends = {row.id: row for row in rows if isinstance(row, FlowEnd)}
    assert starts.keys() == ends.keys(), "an arrow has one end only"
    for number, start in starts.items():
        end = ends[number]
        assert (start.name, start.cat) == (end.name, end.cat)
        assert start.ts <= end.ts, f"{start}: goes back in time"
        for moment in (start, end):
            track = slices.get((moment.pid, moment.tid), [])
            assert any(s.ts - 1e-3 <= moment.ts <= s.ts + s.dur + 1e-3 for s in track), f"{moment}: in no slice"
    return trace


def overlaps(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of spans of one track that overlap without one holding the other."""
    found = []
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row["ph"] == "X":
            tracks.setdefault((row["pid"], row["tid"]), []).append(row)
    for spans in tracks.values():
        around: list[dict[str, Any]] = []  # those that have begun and not ended, the outermost first
        for row in sorted(spans, key=lambda row: (row["ts"], -row["dur"])):
            while around and _end(around[-1]) <= row["ts"] + 1e-3:
                around.pop()
            if around and _end(row) > _end(around[-1]) + 1e-3:
                found.append((around[-1]["name"], row["name"]))
            around.append(row)
    return found


def _end(row: dict[str, Any]) -> float:
    return float(row["ts"] + row["dur"])
