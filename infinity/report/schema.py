"""What a page needs of the files of a run. Files may be damaged, or edited; what else is in them does not matter."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from infinity.report.states import RunState

Number = float | None
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Model(_Part):
    parameters: int
    state_bytes: _Finite


class _Traffic(_Part):
    per_step: list[dict[str, _Finite]] | None = None


class _Prediction(_Part):
    step_seconds: Annotated[float, Field(allow_inf_nan=False)] | None = None
    measured_seconds: _Finite | None = None


class _Baseline(_Part):
    losses: list[Number] = []


class _Drive(_Part):
    directory: str
    read_bytes_per_s: _Finite | None = None
    write_bytes_per_s: _Finite | None = None


class _Run(_Part):
    state: Annotated[RunState, Field(strict=False)] = RunState.FINISHED
    config: dict[str, Any]
    model: _Model | None
    budgets: dict[str, _Finite]
    first_step: int = 0
    counters_at_start: dict[str, _Finite] = {}
    error: dict[str, Any] | None = None
    losses: list[Number] = []
    step_seconds: list[_Seconds] = []
    stalls: dict[str, _Finite] = {}
    traffic: _Traffic = _Traffic()
    expected_traffic: list[dict[str, _Finite]] | None = None
    prediction: _Prediction | None = None
    wear: list[dict[str, Any]] = []
    baseline: _Baseline | None = None
    drives: list[_Drive] = []
    tokens_per_second: _Finite | None = None
    peak_rss_bytes: _Finite | None = None


class _Row(_Part):
    loss: Number
    step_seconds: _Positive
    counters: dict[str, _Finite]


class _Event(_Part):
    pid: int | str
    tid: int | str
    name: str


class _Name(_Event):
    class _Arguments(_Part):
        name: str | int

    ph: Literal["M"]
    args: _Arguments


class _Span(_Event):
    ph: Literal["X"]
    cat: str
    ts: _Finite
    dur: _Finite
    args: dict[str, Any] = {}


class _Held(_Part):
    class _Arguments(_Part):
        bytes: _Finite

    ph: Literal["C"]
    name: str
    ts: _Finite
    args: _Arguments


_RUN: TypeAdapter[object] = TypeAdapter(_Run)
_ROW: TypeAdapter[object] = TypeAdapter(_Row)
_EVENT: TypeAdapter[object] = TypeAdapter(Annotated[_Name | _Span | _Held, Field(discriminator="ph")])
_SHOWN = ("M", "X", "C")
_NAMES = ("process_name", "thread_name")


def wrong_in_run(run: Any) -> str | None:
    """What is wrong with the object of a run; None where nothing is."""
    return _wrong(_RUN, run)


def is_row(row: Any) -> bool:
    """Whether a line of the rows is one of a step."""
    return _wrong(_ROW, row) is None


def wrong_in_trace(trace: Any) -> str | None:
    """What is wrong with a trace; events that no page shows may be anything."""
    events = trace.get("traceEvents", []) if isinstance(trace, dict) else None
    if not isinstance(events, list):
        return "it has no list of events"
    for number, event in enumerate(events):
        kind = event.get("ph") if isinstance(event, dict) else None
        is_other_name = kind == "M" and event.get("name") not in _NAMES
        if kind in _SHOWN and not is_other_name and (wrong := _wrong(_EVENT, event)):
            return f"event {number}: {wrong}"
    return None


def _wrong(kind: TypeAdapter[object], value: Any) -> str | None:
    try:
        kind.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        return ": ".join(part for part in (".".join(map(str, first["loc"])), first["msg"]) if part)
    return None
