"""Looking at a running engine from outside: does anything move, and where is everything."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from infinity.observe.stalls import Stall
from infinity.optim.pipeline import UpdatePipeline
from infinity.residency import HostCopy
from infinity.sizes import format_nbytes
from storage.budget import TierBudget
from storage.pool import HostPool
from storage.store import ShardStore


class Inspection:
    """Reads what others write; changes nothing. May be used from any thread.

    Args:
        saved: grows with what checkpoints have written.
        stalls: the last waits of the training thread, oldest first.
    """

    def __init__(
        self,
        copies: Sequence[HostCopy],
        budgets: Mapping[str, TierBudget],
        pool: HostPool,
        store: ShardStore | None,
        pipeline: UpdatePipeline,
        *,
        saved: Callable[[], int],
        stalls: Callable[[], Sequence[Stall]],
    ) -> None:
        self._copies = copies
        self._budgets = budgets
        self._pool = pool
        self._store = store
        self._pipeline = pipeline
        self._saved = saved
        self._stalls = stalls

    def progress(self) -> int:
        """Grows with everything that completes; a wait for something stuck looks at it."""
        return (self._store.progress if self._store is not None else 0) + self._pipeline.chunks_done + self._saved()

    def report(self) -> str:
        """Where every shard is, who holds what, what is in flight, the last waits; for people and errors."""
        lines = [*self._residency(), *self._memory(), *self._drives()]
        stalls = [_describe(stall) for stall in reversed(self._stalls())]
        return "\n".join([*lines, "last stalls, newest first:", *_indented(stalls or ["none"])])

    def _residency(self) -> list[str]:
        """Every shard with its last states, the present one last."""
        copies = [f"{copy.describe()}{' (claimed)' if copy.is_claimed else ''}" for copy in self._copies]
        return ["residency:", *_indented(copies)]

    def _memory(self) -> list[str]:
        pool = self._pool
        lines = [_held("host memory", pool.leased_nbytes, pool.capacity_nbytes, pool.holders())]
        for budget in self._budgets.values():
            lines.append(_held(budget.name, budget.used_nbytes, budget.limit_nbytes, budget.holders()))
            lines += _indented(f"waiting: {who}" for who in budget.waiting())
        return lines

    def _drives(self) -> list[str]:
        if self._store is None:
            return []
        drives = [
            f"{drive.directory}: {format_nbytes(drive.held_nbytes)} of {format_nbytes(drive.capacity_nbytes)} in use, "
            f"{drive.state.value}{f' ({drive.cause})' if drive.cause else ''}"
            for drive in self._store.drive_report()
        ]
        in_flight = self._store.describe_in_flight()
        return ["drives:", *_indented(drives), "in flight:", *_indented(in_flight or ["nothing"])]


def _held(name: str, used_nbytes: int, limit_nbytes: int, holders: Mapping[str, int]) -> str:
    """Who holds how much, the largest first."""
    ordered = sorted(holders.items(), key=lambda item: -item[1])
    held = ", ".join(f"{owner} {nbytes}" for owner, nbytes in ordered) or "nothing"
    return f"{name}: {used_nbytes} of {limit_nbytes} bytes held: {held}"


def _describe(stall: Stall) -> str:
    waited_for = f": {stall.waited_for}" if stall.waited_for else ""
    ago_s = time.perf_counter() - stall.start_s - stall.duration_s
    return f"{stall.duration_s:.4f} s, {ago_s:.4f} s ago, {stall.cause.value}{waited_for}"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]
