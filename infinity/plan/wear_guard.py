"""Keeps a run to its wear budget: counts what it writes in the ledger, and says when to warn, to pause or to stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from infinity.config import WearAction, WearBudget
from infinity.plan.ledger import LedgerError, WearLedger, today
from infinity.sizes import format_nbytes
from storage.devices import identify_device
from storage.store import ShardStore

_log = logging.getLogger(__name__)
_SECONDS_OF_A_DAY = 86_400.0
_FLUSH_S = 30.0  # a crash loses at most what was written meanwhile


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run should do after a step. `message` is for the user, each once; empty when there is nothing to say."""

    pause_s: float = 0.0
    must_stop: bool = False
    message: str = ""


class WearGuard:
    """Watches one run. Used by the training thread.

    Args:
        ledger: what was written before, by all runs.
        written: bytes that this run has written so far, by device.
        budget: of each drive; None: only count.
        now_s, day: the time, in seconds from any moment, and the day in UTC.
    """

    def __init__(
        self,
        ledger: WearLedger,
        written: Callable[[], Mapping[str, int]],
        budget: WearBudget | None,
        action: WearAction,
        *,
        now_s: Callable[[], float] = time.monotonic,
        day: Callable[[], str] = today,
    ) -> None:
        self._ledger: WearLedger | None = ledger
        self._written = written
        self._budget = budget
        self._action = action
        self._now_s = now_s
        self._day = day
        self._noted: dict[str, int] = {}  # nothing yet: what initialisation wrote is the first to be entered
        self._started = dict(written())
        self._started_s = self._flushed_s = now_s()
        self._told: set[tuple[str, str]] = set()

    @classmethod
    def of_store(cls, store: ShardStore | None, budget: WearBudget | None, action: WearAction) -> WearGuard:
        """The guard of an engine's swap files."""
        devices: dict[str, str] = {}

        def written() -> dict[str, int]:
            found: dict[str, int] = {}
            for report in store.drive_report() if store is not None else ():
                device = devices.get(report.directory)
                if device is None:
                    device = devices[report.directory] = identify_device(Path(report.directory))
                found[device] = found.get(device, 0) + report.write.nbytes
            return found

        return cls(WearLedger(), written, budget, action)

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
            f"{format_nbytes(used)} have been written to {device}{span}; the wear budget is "
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
        is_news = bool(pause_s) and (device, "slow") not in self._told
        self._told.add((device, "slow") if is_news else (device, ""))
        text = f"pausing between steps: the wear budget of {device} is {format_nbytes(budget.nbytes)} a day"
        return Verdict(pause_s, message=text if is_news else "")

    @staticmethod
    def _worse(one: Verdict, other: Verdict) -> Verdict:
        message = "\n".join(text for text in (one.message, other.message) if text)
        return Verdict(max(one.pause_s, other.pause_s), one.must_stop or other.must_stop, message)
