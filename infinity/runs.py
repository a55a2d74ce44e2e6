"""Which runs of units a backward is in, told from the order in which autograd numbers and executes nodes.

[Note: when the backward of a run is over]
Autograd numbers the nodes of a thread in the order in which they are made, a node depends only on nodes made after it,
and of those that are ready the newest is executed first. So when a node is about to be executed that is older than the
first one of a run, every node of the run that takes part has been executed. That is seen without a change to the graph
(an identity function around the inputs would add up their gradients in another order, and forbid changing them in
place), at three points:

1. the node behind an input of the run is about to be executed;
2. the backward of another run begins that had ended before this one started;
3. the graph task ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from infinity.groups import Unit
from infinity.torch_compat import graph_task, next_sequence_nr


class Run:
    """One forward of a unit in grad mode: its nodes have numbers from `first` to less than `last`."""

    __slots__ = ("first", "is_open", "last", "thread", "unit")

    def __init__(self, unit: Unit, first: int) -> None:
        self.unit = unit
        self.thread = threading.get_ident()
        self.first = first
        self.last = first
        self.is_open = False  # its backward has begun and is not over; written by `OpenRuns`

    @classmethod
    def start(cls, unit: Unit) -> Run:
        """A run whose forward begins."""
        return cls(unit, next_sequence_nr())

    @classmethod
    def of_unknown_start(cls, unit: Unit) -> Run:
        """A run whose beginning was not seen: it is over when the graph task is."""
        return cls(unit, 0)

    def end(self) -> None:
        """Its forward is over."""
        self.last = next_sequence_nr()

    def is_after(self, other: Run) -> bool:
        """Whether this run started when `other` had ended. Numbers of different threads cannot be compared."""
        return self.thread == other.thread and self.first >= other.last


class OpenRuns:
    """The runs whose backward has begun and is not over. Used by the thread that runs the backward.

    Args:
        close: called once for every run whose backward is over.
    """

    def __init__(self, close: Callable[[Unit], None]) -> None:
        self._close = close
        self._open: dict[Run, int | None] = {}  # the graph task in which its backward began

    def begin(self, run: Run) -> None:
        """A node of `run` is about to be executed. Idempotent."""
        task = graph_task()
        self._close_all([other for other, its_task in self._open.items() if its_task == task and other.is_after(run)])
        self._open.setdefault(run, task)
        run.is_open = True

    def pass_by(self, run: Run) -> None:
        """A node older than all of `run` is about to be executed. Idempotent."""
        if run in self._open:
            self._close_all([run])

    def end_task(self, task: int) -> None:
        """A graph task has ended, and with it the runs that began in it."""
        self._close_all([run for run, its_task in self._open.items() if its_task == task])

    def clear(self) -> None:
        """Forget all runs: the backward failed."""
        for run in self._open:
            run.is_open = False
        self._open.clear()

    def _close_all(self, runs: Iterable[Run]) -> None:
        for run in runs:
            del self._open[run]
            run.is_open = False
            self._close(run.unit)
