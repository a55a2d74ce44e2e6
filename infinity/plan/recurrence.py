"""Whether a simulated step will go as the one before, which its first forward tells.

A simulation is a machine without chance: where it stands as it stood one step ago, it goes on as it went. By the end of
the first forward a step has used up what it found: every shard that was kept or read ahead has been taken, every update
that was left has run. So if all that happened until then happened in the step before as well, as long after its
beginning, and the same is under way, then the two steps are alike, and so are all further ones. What need not show
within a step is asked for besides: how much of a drive's cache is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.plan.timeline import Span
from infinity.plan.training_thread import TrainingThread

_RESOLUTION = 1e-9  # of a step, within which times are the same: sums of the same numbers differ by much less
_CACHE_RESOLUTION_NBYTES = 1.0


@dataclass(frozen=True, slots=True)
class _Forward:
    """How the first forward of a step went: when the step began, what happened, and what is under way at its end."""

    began_s: float
    spans: Sequence[Span]
    under_way: Sequence[tuple[str, float]]
    cache_free_nbytes: Sequence[float]


class Recurrence:
    """Looks at the steps of a simulated rank, one after the other."""

    def __init__(self, thread: TrainingThread) -> None:
        self._thread = thread
        self._before: _Forward | None = None

    def is_repeated(self, began_s: float) -> bool:
        """The first forward of a step that began then has ended: whether the step will go as the one before."""
        store = self._thread.machinery.store
        now = _Forward(began_s, self._thread.spans_since(began_s), store.under_way(), store.cache_free_nbytes())
        before, self._before = self._before, now
        return before is not None and _are_alike(now, before)


def _are_alike(now: _Forward, before: _Forward) -> bool:
    """Whether the same happened, as many seconds after the beginning."""
    later_s = now.began_s - before.began_s
    resolution_s = _RESOLUTION * later_s
    free = zip(now.cache_free_nbytes, before.cache_free_nbytes, strict=True)
    return (
        len(now.spans) == len(before.spans)
        and len(now.under_way) == len(before.under_way)
        and all(abs(free_now - free_then) <= _CACHE_RESOLUTION_NBYTES for free_now, free_then in free)
        and all(
            name == name_then and abs(start_s - then_s - later_s) <= resolution_s
            for (name, start_s), (name_then, then_s) in zip(now.under_way, before.under_way, strict=True)
        )
        and all(
            (span.name, span.lane) == (then.name, then.lane)
            and abs(span.start_s - then.start_s - later_s) <= resolution_s
            and abs(span.end_s - then.end_s - later_s) <= resolution_s
            for span, then in zip(now.spans, before.spans, strict=True)
        )
    )
