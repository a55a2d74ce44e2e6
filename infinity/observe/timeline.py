"""How long units ran, as spans of the trace, and what the tiers held when they began and ended.

[Note: ranges of the profiler]
A forward is a range of torch's profiler too. A backward is none: it begins within one of autograd's nodes and ends
within another, and the profiler, which takes ranges of a thread to be nested, would charge the operations of these
nodes to the wrong ones. Gathering for it and harvesting its gradients are ranges with the unit's name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torch.profiler import record_function

from infinity.groups import Unit
from infinity.observe.trace import Trace, profiled
from infinity.order import Phase


class UnitTimeline:
    """Notes forwards and backwards of units. Owned by the training thread.

    A run that fails never ends; its beginning is forgotten when the unit begins again.

    Args:
        held: what each tier holds at the moment, in bytes; noted when it has changed.
    """

    def __init__(self, trace: Trace, held: Mapping[str, Callable[[], int]]) -> None:
        self._trace = trace
        self._held = dict(held)
        self._last_nbytes = dict.fromkeys(held, -1)
        self._begun_s: dict[tuple[int, Phase], float] = {}
        self._ranges: dict[int, record_function] = {}

    def begins(self, unit: Unit, phase: Phase) -> None:
        """The unit is gathered, and what it computes comes next."""
        self.note_held()
        if phase is Phase.FORWARD:  # see [Note: ranges of the profiler]
            self._ranges[unit.index] = profiled(unit.name, phase.value)
            self._ranges[unit.index].__enter__()  # type: ignore[no-untyped-call]
        self._begun_s[unit.index, phase] = time.perf_counter()

    def ends(self, unit: Unit, phase: Phase) -> None:
        """It has computed."""
        begun_s = self._begun_s.pop((unit.index, phase), None)
        if begun_s is not None:
            self._trace.add(unit.name, phase.value, begun_s, time.perf_counter() - begun_s)
        if phase is Phase.FORWARD and (shown := self._ranges.pop(unit.index, None)) is not None:
            shown.__exit__(None, None, None)
        self.note_held()

    def note_held(self) -> None:
        """What the tiers hold now, where it is not what they held at the last look."""
        for tier, now in self._held.items():
            nbytes = now()
            if nbytes != self._last_nbytes[tier]:
                self._last_nbytes[tier] = nbytes
                self._trace.held(tier, nbytes)
