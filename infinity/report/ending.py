"""How a recorded run ended that did not come to its end, as its record tells it."""

from __future__ import annotations

from typing import Any

from infinity.observe.shortages import report_of
from infinity.report.record import RunState
from storage.errors import causes_of


def how_it_ended(error: BaseException) -> dict[str, Any]:
    """The keys "state" and "error" of the record: what ended the run, its causes, and the engine's report of then."""
    if isinstance(error, KeyboardInterrupt):
        told = {"message": str(error) or "stopped by Ctrl-C", "report": None}
        return {"state": RunState.INTERRUPTED.value, "error": {"type": type(error).__name__, **told}}
    causes = causes_of(error)
    message = "\ncaused by ".join(f"{type(one).__name__}: {one}" for one in causes)
    report = next((found for one in causes if (found := report_of(one)) is not None), None)
    return {
        "state": RunState.FAILED.value,
        "error": {"type": type(error).__name__, "message": message, "report": report},
    }
