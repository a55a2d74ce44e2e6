"""Errors of capacity and time carry a report of where everything was, as a note that tracebacks and commands show.

Attached where the error is raised in the user's thread, so that the report tells of that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from infinity.errors import DeviceOutOfMemoryError, PlacementError
from storage.errors import CapacityError, IoTimeoutError

SHORTAGES = (CapacityError, PlacementError, DeviceOutOfMemoryError, IoTimeoutError)
_HEADLINE = "Where everything was (engine.report()):"


def attach_report(error: BaseException, report: Callable[[], str]) -> None:
    """Add the report to an error of `SHORTAGES` that has none yet; others stay as they are."""
    if isinstance(error, SHORTAGES) and report_of(error) is None:
        error.add_note(f"{_HEADLINE}\n{report()}")


def hand_on_report(error: BaseException, follower: BaseException) -> None:
    """An error that takes the place of another one has its report."""
    note = report_of(error)
    if note is not None and report_of(follower) is None:
        follower.add_note(note)


def report_of(error: BaseException) -> str | None:
    """The report that an error carries, if any."""
    notes: list[str] = getattr(error, "__notes__", [])
    return next((note for note in notes if note.startswith(_HEADLINE)), None)


@contextmanager
def reported(report: Callable[[], str]) -> Iterator[None]:
    """Errors of `SHORTAGES` that leave the block carry the report."""
    try:
        yield
    except SHORTAGES as error:
        attach_report(error, report)
        raise
