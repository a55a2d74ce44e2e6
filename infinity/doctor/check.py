"""What one check says."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"  # a fact: nothing to repair
    WARNING = "warning"  # training works, but slower, or not as far as it could
    FAILURE = "failure"  # training is impossible


@dataclass(frozen=True, slots=True)
class Check:
    """A finding.

    Attributes:
        name: what was looked at.
        found: what there is.
        fix: the line that repairs it: a command or a setting; "" when there is nothing to repair.
        subject: the directory it is about; "" for the machine.
        data: the same in numbers, for programs.
    """

    name: str
    status: Status
    found: str
    fix: str = ""
    subject: str = ""
    data: dict[str, Any] = field(default_factory=dict)
