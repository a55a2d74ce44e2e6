"""Logging that training outlives: a disk that is full, or a folder that is gone, ends the log with a warning."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infinity.observe.exporters import Sink

_log = logging.getLogger(__name__)


class TolerantSink:
    """Hands rows on to a sink, until the system refuses one. Used by the thread that logs.

    Args:
        sink: closed with this one.
        name: of the sink, for the warning.
    """

    def __init__(self, sink: Sink, name: str) -> None:
        self._sink = sink
        self._name = name
        self.has_failed = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row; none after one that was refused."""
        if self.has_failed:
            return
        try:
            self._sink.write(step, values)
        except OSError as error:
            self._fail(f"ends before step {step}", error)

    def close(self) -> None:
        """Nothing follows."""
        try:
            self._sink.close()
        except OSError as error:  # what was not written yet
            if not self.has_failed:
                self._fail("is not complete", error)

    def _fail(self, what: str, error: OSError) -> None:
        self.has_failed = True
        _log.warning("%s %s: %s. Training goes on", self._name, what, error)
