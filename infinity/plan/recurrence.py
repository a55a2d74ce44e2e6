"""Whether a simulated step went as the one before, so that all further ones will.

A simulation is a machine without chance: if all that happened in a step happened in the one before as well, as long
after its beginning, then both began alike, and so does the next. What need not show within a step is asked for besides:
how much of a drive's cache is free.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.plan.timeline import Span
from infinity.plan.training_thread import TrainingThread

_RESOLUTION = 1e-9  # of a step, within which times are the same: sums of the same numbers differ by much less
_CACHE_RESOLUTION_NBYTES = 1.0


class Recurrence:
    """Looks at the steps of a simulated rank, one after the other."""

    def __init__(self, thread: TrainingThread) -> None:
        self._thread = thread
        self._began_s = 0.0
        self._went: tuple[float, Sequence[Span], Sequence[float]] | None = None  # the last step

    def is_repeated(self, now_s: float) -> bool:
        """A step has ended: whether it was like the one before."""
        before, began_s, self._began_s = self._went, self._began_s, now_s
        spans, free = self._thread.spans_since(began_s), self._thread.machinery.store.cache_free_nbytes()
        self._went = began_s, spans, free
        if before is None:
            return False
        before_s, spans_before, free_before = before
        if any(abs(now - then) > _CACHE_RESOLUTION_NBYTES for now, then in zip(free, free_before, strict=True)):
            return False
        return _are_alike(spans, spans_before, began_s - before_s, _RESOLUTION * (now_s - began_s))


def _are_alike(spans: Sequence[Span], before: Sequence[Span], later_s: float, resolution_s: float) -> bool:
    """Whether the same happened so many seconds later."""
    return len(spans) == len(before) and all(
        (now.name, now.lane) == (then.name, then.lane)
        and abs(now.start_s - then.start_s - later_s) <= resolution_s
        and abs(now.end_s - then.end_s - later_s) <= resolution_s
        for now, then in zip(spans, before, strict=True)
    )
