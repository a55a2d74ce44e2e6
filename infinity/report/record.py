"""What is left of a run on disk: `infinity train --record DIR` writes it, `infinity report DIR` reads it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError

RUN_FILE, METRICS_FILE, TRACE_FILE = "run.json", "metrics.jsonl", "trace.json"
_NEEDED = ("config", "model", "losses", "step_seconds", "budgets", "stalls", "traffic")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run.

    Attributes:
        run: the object of `infinity train --json`.
        steps: the rows of `--metrics`, one per step; empty where it was not asked for.
        spans: complete events of `--trace` ("ts" and "dur" in µs), each with its track's name under "track"; likewise.
    """

    name: str
    run: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> RunRecord:
        """Read the folder of a recorded run, or the file of `infinity train --json` alone.

        Raises:
            ConfigError: nothing there, or something else.
        """
        folder = path if path.is_dir() else None
        file = path / RUN_FILE if folder else path
        run = _read_json(file)
        missing = [key for key in _NEEDED if not isinstance(run, dict) or key not in run]
        if missing:
            raise ConfigError(
                f"{file}: is not what `infinity train --json` writes (without {', '.join(missing)}); give its file, or "
                "the folder of `infinity train --record`"
            )
        if folder is None:
            return cls(path.stem, run)
        return cls(path.resolve().name, run, _read_lines(path / METRICS_FILE), _read_spans(path / TRACE_FILE))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """One object per line; the last line of a run that was killed may be cut off."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _read_spans(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    rows = _read_json(path).get("traceEvents", [])
    names = {
        (row["pid"], row["name"], row["tid"]): row["args"]["name"]
        for row in rows
        if row.get("ph") == "M" and row.get("name") in ("process_name", "thread_name")
    }

    def track(row: dict[str, Any]) -> str:
        place = names.get((row["pid"], "process_name", 0), "")
        return f"{place}: {names.get((row['pid'], 'thread_name', row['tid']), row['tid'])}"

    return [row | {"track": track(row)} for row in rows if row.get("ph") == "X"]
