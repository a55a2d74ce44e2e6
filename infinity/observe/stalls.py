"""Every wait of the training thread: bounded, measured, and charged to a cause.

[Note: progress, not time]
A wait does not end because it took long; a slow disk is allowed to be slow. It ends when nothing at all has moved for
`io_timeout_s`: no block of any transfer completed and no kernel finished. Then the transfer is stuck, and the error
carries a residency report.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum

from infinity.devices.base import Fence
from infinity.observe.shortages import attach_report, reported
from storage.errors import IoTimeoutError
from storage.types import Ticket

_POLL_S = 0.25
_RECENT = 10


class StallCause(StrEnum):
    """What the training thread waited for."""

    NVME_READ = "nvme_read"
    NVME_WRITE = "nvme_write"
    OPTIMIZER = "optimizer"
    GRADIENT_SPACE = "gradient_space"
    GRADIENT_READ = "gradient_read"
    ACTIVATION = "activation"  # memory for a unit's input, or that input on its way back
    LINK = "link"
    COMMIT = "commit"  # the step before is not committed yet, and its bytes are about to be overwritten
    SAVE = "save"  # a checkpoint is being written
    RANKS = "ranks"  # other ranks are not there yet, or their bytes are on the way


@dataclass(frozen=True, slots=True)
class Stall:
    """One wait of the training thread. Times on `time.perf_counter`'s clock.

    Attributes:
        waited_for: what it waited for; empty where the cause says it all.
        duration_s: without waits for other causes in between.
    """

    cause: StallCause
    waited_for: str
    start_s: float
    duration_s: float


class StallClock:
    """Waits for tickets on behalf of the training thread and adds up the seconds by cause.

    Args:
        io_timeout_s: longest time without any progress.
        progress: a counter that grows with everything that completes.
        report: text that tells what is in flight and where every shard is; errors of capacity and time carry it.
        on_stall: called after every wait.
    """

    def __init__(
        self,
        io_timeout_s: float,
        progress: Callable[[], int],
        report: Callable[[], str],
        on_stall: Callable[[Stall], None] | None = None,
    ) -> None:
        self._io_timeout_s = io_timeout_s
        self._progress = progress
        self._report = report
        self._on_stall = on_stall
        self.seconds: dict[StallCause, float] = dict.fromkeys(StallCause, 0.0)
        self.counts: dict[StallCause, int] = dict.fromkeys(StallCause, 0)
        self._recent: deque[Stall] = deque(maxlen=_RECENT)

    def wait(self, ticket: Ticket, cause: StallCause, check: Callable[[], None] | None = None) -> None:
        """Wait for a ticket and raise what went wrong with it. A ready ticket costs a flag check.

        Args:
            check: called now and then; raises when the ticket cannot complete any more.

        Raises:
            IoTimeoutError: nothing made progress for `io_timeout_s` seconds.
        """
        try:
            self.settle(ticket, cause, check)
            ticket.result()
        except BaseException as error:
            attach_report(error, self._report)
            raise

    def settle(self, ticket: Ticket, cause: StallCause, check: Callable[[], None] | None = None) -> None:
        """Like `wait`, but a ticket that failed is as good as one that succeeded."""
        if not ticket.done:
            self._measure(ticket.wait, ticket.label, cause, check)

    def wait_fence(self, fence: Fence, label: str) -> None:
        """Wait for a copy between host and device and raise what went wrong with it.

        Raises:
            IoTimeoutError: nothing made progress for `io_timeout_s` seconds.
        """
        try:
            self.settle_fence(fence, label)
            fence.wait()
        except BaseException as error:
            attach_report(error, self._report)
            raise

    def reporting(self) -> AbstractContextManager[None]:
        """Errors of capacity and time that leave the block carry the report of where everything is."""
        return reported(self._report)

    def settle_fence(self, fence: Fence, label: str) -> None:
        """Like `wait_fence`, but a copy that failed is as good as one that succeeded."""

        def is_over(timeout_s: float) -> bool:
            try:
                fence.wait(timeout_s)
            except TimeoutError:
                return False
            except Exception:
                return True  # `wait_fence` asks again and raises it
            return True

        if not fence.done:
            self._measure(is_over, label, StallCause.LINK, None)

    def _measure(
        self, is_over: Callable[[float], bool], label: str, cause: StallCause, check: Callable[[], None] | None
    ) -> None:
        started_s = time.perf_counter()
        try:
            self._wait(is_over, label, cause, check)
        finally:
            self._charge(cause, label, started_s)

    def _wait(
        self, is_over: Callable[[float], bool], label: str, cause: StallCause, check: Callable[[], None] | None
    ) -> None:
        seen = self._progress()
        moved_s = time.monotonic()
        while not is_over(min(_POLL_S, self._io_timeout_s)):
            if check is not None:
                check()
            now = self._progress()
            if now != seen:
                seen, moved_s = now, time.monotonic()
            elif time.monotonic() - moved_s >= self._io_timeout_s:
                stuck = IoTimeoutError(
                    f"no transfer made progress for {self._io_timeout_s:g} s while waiting for {label} "
                    f"({cause.value}). The device is stuck or far too slow; check it, or raise nvme.io_timeout_s"
                )
                attach_report(stuck, self._report)
                raise stuck

    @contextmanager
    def charged(self, cause: StallCause) -> Iterator[None]:
        """Charge the time that a block takes to a cause, without the waits in it, which have causes of their own.

        Whoever waits in the block by other means than this clock bounds that itself.
        """
        started_s, charged_s = time.perf_counter(), self.total_s
        try:
            yield
        finally:
            self._charge(cause, "", started_s, within_s=self.total_s - charged_s)

    def _charge(self, cause: StallCause, waited_for: str, started_s: float, within_s: float = 0.0) -> None:
        duration_s = max(0.0, time.perf_counter() - started_s - within_s)
        stall = Stall(cause, waited_for, started_s, duration_s)
        self.seconds[cause] += stall.duration_s
        self.counts[cause] += 1
        self._recent.append(stall)
        if self._on_stall is not None:
            self._on_stall(stall)

    @property
    def recent(self) -> list[Stall]:
        """The last waits, oldest first."""
        return list(self._recent)

    @property
    def total_s(self) -> float:
        """Seconds of all waits so far."""
        return sum(self.seconds.values())
