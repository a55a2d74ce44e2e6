"""Looking at a running engine from outside: does anything move, and where is everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from infinity.optim.pipeline import UpdatePipeline
from infinity.residency import HostCopy
from storage.budget import TierBudget
from storage.store import ShardStore


class Inspection:
    """Reads what others write; changes nothing. May be used from any thread."""

    def __init__(
        self,
        copies: Sequence[HostCopy],
        budgets: Mapping[str, TierBudget],
        store: ShardStore | None,
        pipeline: UpdatePipeline,
        saved: Callable[[], int] = lambda: 0,
    ) -> None:
        self._copies = copies
        self._budgets = budgets
        self._store = store
        self._pipeline = pipeline
        self._saved = saved  # grows with what checkpoints have written

    def progress(self) -> int:
        """Grows with everything that completes; a wait for something stuck looks at it."""
        return (self._store.progress if self._store is not None else 0) + self._pipeline.chunks_done + self._saved()

    def report(self) -> str:
        """Where every shard is and what is in flight, for error messages."""
        lines = ["residency:"]
        lines += [f"  {copy.describe()}{' (claimed)' if copy.is_claimed else ''}" for copy in self._copies]
        for budget in self._budgets.values():
            held = ", ".join(f"{owner} {nbytes}" for owner, nbytes in budget.holders().items()) or "nothing"
            lines.append(f"{budget.name}: {budget.used_nbytes} of {budget.limit_nbytes} bytes held: {held}")
            lines += [f"  waiting: {who}" for who in budget.waiting()]
        if self._store is not None:
            lines.append("in flight:")
            lines += [f"  {what}" for what in self._store.describe_in_flight()]
        return "\n".join(lines)
