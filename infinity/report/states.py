"""How far a recorded run has come."""

from __future__ import annotations

from enum import StrEnum


class RunState(StrEnum):
    """How far a run has come; see `infinity.cli.recording`."""

    RUNNING = "running"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    FINISHED = "finished"
