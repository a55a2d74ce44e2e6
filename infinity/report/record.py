"""What is left of a run on disk: `infinity train --record` or a `RunRecorder` writes it, `infinity report` reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.observe.names import stalls_between
from infinity.report.schema import is_row, wrong_in_run, wrong_in_trace
from infinity.report.states import RunState

__all__ = ["METRICS_FILE", "RUN_FILE", "TRACE_FILE", "RunRecord", "RunState"]

RUN_FILE, METRICS_FILE, TRACE_FILE = "run.json", "metrics.jsonl", "trace.json"
_NEEDED = ("config", "model", "budgets")
_MEASURED = ("losses", "step_seconds", "stalls", "traffic")
_EXPECTED = "give the folder that `infinity train --record` or a RunRecorder was given, or the file of `train --json`"
_WITHOUT = "remove it to see the rest of the run"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run.

    Attributes:
        run: the object of `infinity train --json`. Of a run that is not finished, what its rows tell.
        steps: the rows of `--metrics`, one per step since the run's first one; empty where it was not asked for.
        spans: complete events of `--trace` ("ts" and "dur" in µs), each with its track's name under "track"; likewise.
        held: what tiers held ("ts" in µs, "name" of the tier, "bytes"), from the trace too.
    """

    name: str
    run: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    held: list[dict[str, Any]] = field(default_factory=list)

    @property
    def state(self) -> RunState:
        """Whether the run has finished, has failed, was stopped, or was still going on."""
        return RunState(self.run.get("state", RunState.FINISHED))

    @classmethod
    def load(cls, path: Path) -> RunRecord:
        """Read the folder of a recorded run, or the file of `infinity train --json` alone.

        Raises:
            ConfigError: nothing there, or something else.
        """
        folder = path if path.is_dir() else None
        file = path / RUN_FILE if folder else path
        run = _read_run(file)
        is_finished = not isinstance(run, dict) or run.get("state", RunState.FINISHED) == RunState.FINISHED
        needed = (*_NEEDED, *_MEASURED) if is_finished else _NEEDED
        missing = [key for key in needed if not isinstance(run, dict) or key not in run]
        if missing:
            raise ConfigError(
                f"{file}: is not what `infinity train --json` writes (without {', '.join(missing)}); {_EXPECTED}"
            )
        if (wrong := wrong_in_run(run)) is not None:
            raise ConfigError(f"{file}: is damaged: {wrong}")
        rows = _read_lines(path / METRICS_FILE) if folder else []
        first_step = run.get("first_step", 0)  # rows before it are of the process that this one continues
        steps = [row for row in rows if not isinstance(row.get("step"), int) or row["step"] >= first_step]
        if not is_finished:
            run = _measured_by(steps, run.get("counters_at_start", {})) | run
        run = run | {"losses": _numbers(run["losses"])}
        if folder is None:
            return cls(path.stem, run)
        return cls(path.resolve().name, run, steps, *_read_trace(path / TRACE_FILE))


def _measured_by(steps: Sequence[dict[str, Any]], at_start: dict[str, float]) -> dict[str, Any]:
    """What the rows of a run that is not finished tell of it."""
    return {
        "losses": [row["loss"] for row in steps],
        "step_seconds": [row["step_seconds"] for row in steps],
        "stalls": stalls_between(at_start, steps[-1]["counters"] if steps else {}),
        "traffic": {},
    }


def _numbers(losses: Sequence[float | None]) -> list[float]:
    """JSON has no NaN; it stands there as null."""
    return [math.nan if loss is None else loss for loss in losses]


def _read_run(path: Path) -> Any:
    try:
        return _read_json(path)
    except ConfigError as error:
        raise ConfigError(f"{error}; {_EXPECTED}") from error.__cause__


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """One object per line, up to one that is no row: the last line of a run that was killed may be cut off."""
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}; {_WITHOUT}") from error
    rows: list[dict[str, Any]] = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not is_row(row):
            break
        rows.append(row)
    return rows


def _read_trace(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Spans, and what tiers held."""
    if not path.exists():
        return [], []
    try:
        trace = _read_json(path)
        wrong = wrong_in_trace(trace)
    except ConfigError as error:
        raise ConfigError(f"{error}; {_WITHOUT}") from error.__cause__
    if wrong is not None:
        raise ConfigError(f"{path}: is damaged: {wrong}; {_WITHOUT}")
    rows = [row for row in trace.get("traceEvents", []) if isinstance(row, dict)]
    names = {
        (row["pid"], row["name"], row["tid"]): row["args"]["name"]
        for row in rows
        if row.get("ph") == "M" and row.get("name") in ("process_name", "thread_name")
    }

    def track(row: dict[str, Any]) -> str:
        place = names.get((row["pid"], "process_name", 0), "")
        return f"{place}: {names.get((row['pid'], 'thread_name', row['tid']), row['tid'])}"

    spans = [row | {"track": track(row)} for row in rows if row.get("ph") == "X"]
    held = [
        {"ts": row["ts"], "name": row["name"].removesuffix(" bytes"), "bytes": row["args"]["bytes"]}
        for row in rows
        if row.get("ph") == "C"
    ]
    return spans, held
