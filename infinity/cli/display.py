"""What a person sees of a run: a live panel on a terminal, one line per step elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from infinity.cli.records import StepRecord
from infinity.sizes import format_nbytes

_REFRESH_PER_S = 4


class Display:
    """Shows the progress of one run. Use as a context manager around the steps."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("training", total=steps)
        self._live: Live | None = None

    def say(self, what: RenderableType) -> None:
        """Print something that stays."""
        self.console.print(what, markup=False)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(self._progress, console=self.console, refresh_per_second=_REFRESH_PER_S)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(self, record: StepRecord) -> None:
        """A step is over."""
        self._progress.advance(self._task)
        if self._live is None:
            self.console.print(step_line(record), markup=False, soft_wrap=True)
        else:
            self._live.update(Group(self._progress, step_panel(record)))


def step_line(record: StepRecord) -> str:
    """One step in a line."""
    norm = "" if record.grad_norm is None else f"  norm {record.grad_norm:.4f}"
    return (
        f"step {record.step}  loss {record.loss:.4f}{norm}  {record.seconds:.3f} s  "
        f"{record.tokens_per_second:,.0f} tokens/s  "
        f"read {_rate(record, 'read')}  write {_rate(record, 'write')}  stalled {record.moved('stall/total_s'):.3f} s"
    )


def step_panel(record: StepRecord) -> Table:
    """One step as a table."""
    table = Table.grid(padding=(0, 2))
    speed = f"{record.tokens_per_second:,.0f}"
    table.add_row("step", str(record.step), "loss", f"{record.loss:.4f}", "tokens/s", speed)
    table.add_row("device", _held(record, "device"), "host", _held(record, "host"), "nvme", _nvme(record))
    stalled = record.moved("stall/total_s")
    table.add_row(
        "nvme read",
        _rate(record, "read"),
        "nvme write",
        _rate(record, "write"),
        "stalled",
        f"{stalled:.2f} s of {record.seconds:.2f} s",
    )
    if record.grad_norm is not None:
        table.add_row("grad norm", f"{record.grad_norm:.4f}")
    return table


def _rate(record: StepRecord, way: str) -> str:
    return f"{format_nbytes(int(record.rate(f'nvme/{way}_bytes')))}/s"


def _held(record: StepRecord, tier: str) -> str:
    held, budget = (int(record.counters.get(f"{tier}/{name}_bytes", 0)) for name in ("peak", "budget"))
    return f"at most {format_nbytes(held)} of {format_nbytes(budget)}"


def _nvme(record: StepRecord) -> str:
    return format_nbytes(int(record.counters.get("nvme/capacity_bytes", 0)))
