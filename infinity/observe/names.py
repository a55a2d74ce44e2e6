"""What the names of counters say, for who has an engine and for who reads the files of a run. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping


def by_prefix(counters: Mapping[str, float], prefix: str, suffix: str) -> dict[str, float]:
    """The counters whose names begin and end so, by what is between."""
    return {
        name.removeprefix(prefix).removesuffix(suffix): value
        for name, value in counters.items()
        if name.startswith(prefix) and name.endswith(suffix)
    }


def stalls_between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Seconds of waits by cause from one state of the counters to a later one, and those of all under "total"."""
    then = by_prefix(before, "stall/", "_s")
    return {cause: seconds - then.get(cause, 0.0) for cause, seconds in by_prefix(after, "stall/", "_s").items()}
