"""How long units ran, as spans of the trace."""

from __future__ import annotations

import time

from infinity.groups import Unit
from infinity.observe.trace import Trace
from infinity.order import Phase


class UnitTimeline:
    """Notes forwards and backwards of units. Owned by the training thread.

    A run that fails never ends; its beginning is forgotten when the unit begins again.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._begun_s: dict[tuple[int, Phase], float] = {}

    def begins(self, unit: Unit, phase: Phase) -> None:
        """The unit is gathered, and what it computes comes next."""
        self._begun_s[unit.index, phase] = time.perf_counter()

    def ends(self, unit: Unit, phase: Phase) -> None:
        """It has computed."""
        begun_s = self._begun_s.pop((unit.index, phase), None)
        if begun_s is not None:
            self._trace.add(unit.name, phase.value, begun_s, time.perf_counter() - begun_s)
