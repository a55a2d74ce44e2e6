"""Keeps a run to its wear budget: counts what it writes in the ledger, and says when to warn, to pause or to stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infinity.config import WearAction, WearBudget
from infinity.plan.drive_counters import DriveCount, count_written
from infinity.plan.ledger import LedgerError, WearLedger, today
from infinity.sizes import format_nbytes
from storage.devices import describe_device, identify_device
from storage.store import ShardStore

_log = logging.getLogger(__name__)
_SECONDS_OF_A_DAY = 86_400.0
_FLUSH_S = 30.0  # a crash loses at most what was written meanwhile
_COUNTER_UNIT_NBYTES = 512_000  # of SMART's counter, the coarser one


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run should do after a step. `message` is for the user, each once; empty when there is nothing to say."""

    pause_s: float = 0.0
    must_stop: bool = False
    message: str = ""


@dataclass(frozen=True, slots=True)
class WearReport:
    """What one device took in during a run.

    Attributes:
        device: by which the ledger knows it, the same from boot to boot.
        name: for people.
        written_nbytes: by this run, as its store counted.
        drive_nbytes: by everybody meanwhile, as the drive counted; None where it cannot be read.
        source: of `drive_nbytes`, or why there is none.
        ledger_nbytes: by all runs so far; None where the ledger cannot be used.
    """

    device: str
    name: str
    written_nbytes: int
    drive_nbytes: int | None
    source: str
    ledger_nbytes: int | None

    @property
    def is_plausible(self) -> bool:
        """Whether the drive counted at least what the run wrote, up to its counter's unit."""
        return self.drive_nbytes is None or self.drive_nbytes >= self.written_nbytes - _COUNTER_UNIT_NBYTES

    def to_json(self) -> dict[str, Any]:
        """What a record of the run keeps."""
        return asdict(self) | {"text": self.describe()}

    def describe(self) -> str:
        """One line."""
        own = f"{format_nbytes(self.written_nbytes)} written by the steps"
        total = "" if self.ledger_nbytes is None else f"; {format_nbytes(self.ledger_nbytes)} by all runs so far"
        if self.drive_nbytes is None:
            return f"{self.name}: {own}{total}; not checked against the drive: {self.source}"
        verdict = "" if self.is_plausible else ", which is LESS: the drive counts otherwise, or its counter is wrong"
        return f"{self.name}: {own}, {format_nbytes(self.drive_nbytes)} by {self.source}{verdict}{total}"


class WearGuard:
    """Watches one run. Used by the training thread.

    Args:
        ledger: what was written before, by all runs.
        written: bytes that this run has written so far, by device.
        budget: of each drive; None: only count.
        drives: what each device counts by itself, now.
        names: of the devices, for people; those that are not there are called what the ledger calls them.
        entered: what of `written` is in the ledger already, by device; kept up to date. Guards of the same store share
            it, so that nothing is counted twice.
        now_s, day: the time, in seconds from any moment, and the day in UTC.
    """

    def __init__(
        self,
        ledger: WearLedger,
        written: Callable[[], Mapping[str, int]],
        budget: WearBudget | None,
        action: WearAction,
        *,
        drives: Callable[[], Mapping[str, DriveCount]] = dict,
        names: Mapping[str, str] | None = None,
        entered: dict[str, int] | None = None,
        now_s: Callable[[], float] = time.monotonic,
        day: Callable[[], str] = today,
    ) -> None:
        self._ledger: WearLedger | None = ledger
        self._written = written
        self._budget = budget
        self._action = action
        self._now_s = now_s
        self._day = day
        self._drives = drives
        self._names = {} if names is None else names
        self._drives_before = drives()
        self._noted = {} if entered is None else entered  # at first nothing: what initialisation wrote is entered too
        self._started = dict(written())
        self._started_s = self._flushed_s = now_s()
        self._told: set[tuple[str, str]] = set()

    @classmethod
    def of_store(cls, store: ShardStore | None, budget: WearBudget | None, action: WearAction) -> WearGuard:
        """The guard of an engine's swap files."""
        reports = store.drive_report() if store is not None else []
        devices = {report.directory: identify_device(Path(report.directory)) for report in reports}

        def written() -> dict[str, int]:
            found: dict[str, int] = {}
            for report in store.drive_report() if store is not None else ():
                device = devices[report.directory]
                found[device] = found.get(device, 0) + report.write.nbytes
            return found

        def drives() -> dict[str, DriveCount]:
            return {device: count_written(Path(directory)) for directory, device in devices.items()}

        entered = None if store is None else store.entered_nbytes
        names = {device: describe_device(Path(directory)) for directory, device in devices.items()}
        return cls(WearLedger(), written, budget, action, drives=drives, names=names, entered=entered)

    def report(self) -> list[WearReport]:
        """What each device took in since the guard was made, by the run's own count and by the drive's."""
        self.flush()
        after, reports = self._drives(), []
        for device, nbytes in self._written().items():
            before_count, count = self._drives_before.get(device), after.get(device)
            drive_nbytes, source = None, "not looked at"
            if before_count is not None and count is not None:
                source = count.source
                if before_count.nbytes is not None and count.nbytes is not None:
                    drive_nbytes = count.nbytes - before_count.nbytes
            own = nbytes - self._started.get(device, 0)
            reports.append(WearReport(device, self._name(device), own, drive_nbytes, source, self._in_all(device)))
        return reports

    def _name(self, device: str) -> str:
        return self._names.get(device, device)

    def _in_all(self, device: str) -> int | None:
        try:
            return None if self._ledger is None else self._ledger.written_nbytes(device)
        except LedgerError as error:
            _log.warning("%s", error)
            self._ledger = None
            return None

    def step_ended(self) -> Verdict:
        """Count, and judge. Pauses and stops are the caller's to make."""
        if self._budget is None:
            if self._now_s() - self._flushed_s >= _FLUSH_S:
                self.flush()
            return Verdict()
        self.flush()
        verdict = Verdict()
        for device in sorted(self._noted):
            verdict = self._worse(verdict, self._judge(device, self._budget))
        return verdict

    def flush(self) -> None:
        """Enter what was written since the last time. Trouble with the ledger is told once and ends the counting."""
        self._flushed_s = self._now_s()
        if self._ledger is None:
            return
        try:
            for device, nbytes in self._written().items():
                self._ledger.add(device, nbytes - self._noted.get(device, 0), self._day())
                self._noted[device] = nbytes
        except LedgerError as error:
            _log.warning("%s", error)
            self._ledger = None

    def _judge(self, device: str, budget: WearBudget) -> Verdict:
        if self._ledger is None:
            return Verdict()
        day = self._day()
        try:
            used = self._ledger.written_nbytes(device, day if budget.is_per_day else None)
        except LedgerError as error:
            _log.warning("%s", error)
            self._ledger = None
            return Verdict()
        if self._action is WearAction.SLOW:
            return self._slow(device, budget)
        if used < budget.nbytes:
            return Verdict()
        span = " today" if budget.is_per_day else ""
        text = (
            f"{format_nbytes(used)} have been written to {self._name(device)}{span}; the wear budget is "
            f"{format_nbytes(budget.nbytes)}{' a day' if budget.is_per_day else ''}"
        )
        message = "" if (device, day) in self._told else text
        self._told.add((device, day))
        return Verdict(must_stop=self._action is WearAction.STOP, message=message)

    def _slow(self, device: str, budget: WearBudget) -> Verdict:
        """Pause until this run has written no faster than its budget allows in a whole day."""
        own_nbytes = self._noted[device] - self._started.get(device, 0)
        due_s = own_nbytes / budget.nbytes * _SECONDS_OF_A_DAY
        pause_s = max(due_s - (self._now_s() - self._started_s), 0.0)
        if not pause_s or (device, "slow") in self._told:
            return Verdict(pause_s)
        self._told.add((device, "slow"))
        text = f"pausing between steps: the wear budget of {self._name(device)} is {format_nbytes(budget.nbytes)} a day"
        return Verdict(pause_s, message=text)

    @staticmethod
    def _worse(one: Verdict, other: Verdict) -> Verdict:
        message = "\n".join(text for text in (one.message, other.message) if text)
        return Verdict(max(one.pause_s, other.pause_s), one.must_stop or other.must_stop, message)
