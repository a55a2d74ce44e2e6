"""What a person sees of a run: a live display on a terminal, one line per step elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live

from infinity.cli.console import can_redraw, is_terminal
from infinity.cli.live import LiveView
from infinity.cli.records import Counters, StepRecord
from infinity.cli.stopping import undisturbed
from infinity.sizes import format_nbytes

_REFRESH_PER_S = 4


class Display:
    """Shows the progress of one run. Use as a context manager around the steps.

    Args:
        n_steps: how many steps the run is to have.
        counters: gives the engine's counters as they stand; asked a few times a second, from another thread.
        drives: names of the drives, in the order of their counters.
        live: whether the display is drawn anew in place; None where the console can.
    """

    def __init__(
        self,
        console: Console,
        n_steps: int,
        counters: Callable[[], Counters],
        drives: Sequence[str] = (),
        *,
        live: bool | None = None,
    ) -> None:
        self.console = console
        self._n_steps = n_steps
        self._n_done = 0
        self._counters = counters
        self._drives = drives
        self._is_live = can_redraw(console) if live is None else live
        self._view: LiveView | None = None
        self._live: Live | None = None

    def say(self, what: RenderableType) -> None:
        """Print something that stays. In a file a sentence is one line, so that a path in it can be found."""
        is_line = isinstance(what, str) and not is_terminal(self.console)
        self.console.print(what, markup=False, soft_wrap=is_line)

    def __enter__(self) -> Self:
        if self._is_live:
            self._view = LiveView(self._n_steps, self._counters, self._drives)
            self._live = Live(self._view, console=self.console, refresh_per_second=_REFRESH_PER_S)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            with undisturbed():  # whatever happens, the cursor comes back
                self._live.stop()
            self._live = self._view = None

    def step(self, record: StepRecord) -> None:
        """A step is over."""
        self._n_done += 1
        if self._view is None:
            line = f"{step_line(record)}  {self._n_done} of {self._n_steps}"
            self.console.print(line, markup=False, soft_wrap=True)
        else:
            self._view.step(record)


def step_line(record: StepRecord) -> str:
    """One step in a line."""
    norm = "" if record.grad_norm is None else f"  norm {record.grad_norm:.4f}"
    return (
        f"step {record.step}  loss {record.loss:.4f}{norm}  {record.seconds:.3f} s  "
        f"{record.tokens_per_second:,.0f} tokens/s  "
        f"read {_rate(record, 'read')}  write {_rate(record, 'write')}  stalled {record.moved('stall/total_s'):.3f} s"
    )


def _rate(record: StepRecord, way: str) -> str:
    return f"{format_nbytes(int(record.rate(f'nvme/{way}_bytes')))}/s"
