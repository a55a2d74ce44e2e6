"""The counters of a run, step by step, to files and to the loggers that people have.

    log = MetricsLog(engine, ["run.jsonl", TensorBoard(SummaryWriter("runs/1"))])
    ...
    optimizer.step()
    log.step(loss=loss.item())

What the names mean is in docs/metrics.md. A step costs one read of the counters, which waits for nothing, and one row
for each sink.
"""

from __future__ import annotations

import csv
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Protocol

from infinity.errors import ConfigError
from infinity.json_text import json_text
from infinity.observe.tolerant import TolerantSink
from infinity.replacing import replaced_file
from storage.closing import Closing
from storage.paths import StrPath

Values = Mapping[str, float]
_RATES = {
    "step/nvme_read_bytes_per_s": "nvme/read_bytes",
    "step/nvme_write_bytes_per_s": "nvme/write_bytes",
}


class Counted(Protocol):
    """What is logged: an engine."""

    def counters(self) -> dict[str, float]:
        """All counters as they stand, without waiting."""


class Sink(Protocol):
    """Where rows go. Used by the thread that logs."""

    def write(self, step: int, values: Values) -> None:
        """One row."""

    def close(self) -> None:
        """Nothing follows. Idempotent."""


class JsonLines:
    """One object per step and line. Each line is there as soon as it is written. JSON has no NaN: it becomes null.

    Args:
        first_step: of the rows to come. If it is not 0, a file that is there is continued: rows of earlier steps stay,
            those of steps that come again go.

    Raises:
        ConfigError: the file cannot be read or written.
    """

    def __init__(self, path: StrPath, *, first_step: int = 0) -> None:
        path = Path(path)
        with _told(path):
            if first_step and path.is_file():
                before = path.read_text(encoding="utf-8").splitlines()
                kept = [f"{line}\n" for line in before if _step_of(line) < first_step]
                self._file = _replaced(path, lambda file: file.writelines(kept))
            else:  # also a pipe, a terminal or another device
                self._file = path.open("w", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Append the row of a step."""
        self._file.write(json_text({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


class Csv:
    """One line per step under a header; a value that first appears later adds a column to the whole file.

    Args:
        first_step: as of `JsonLines`.

    Raises:
        ConfigError: the file cannot be read or written, or is no file but a pipe or a device.
    """

    def __init__(self, path: StrPath, *, first_step: int = 0) -> None:
        self._path = Path(path)
        self._columns: list[str] = []
        rows: list[dict[str, str]] = []
        with _told(self._path):
            if self._path.exists() and not self._path.is_file():
                raise ConfigError(f"{self._path} is no file, and new columns rewrite a CSV file; use .jsonl there")
            if first_step and self._path.exists():
                self._columns, before = self._read()
                rows = [row for row in before if row.get("step", "").isdecimal() and int(row["step"]) < first_step]
            self._file = self._written(rows)

    def write(self, step: int, values: Values) -> None:
        """Append the row of a step; the file is written anew when it has values of new names."""
        row: dict[str, float] = {"step": step, **values}
        new = [name for name in row if name not in self._columns]
        if new:
            self._widen(new)
        csv.DictWriter(self._file, self._columns, restval="").writerow(row)
        self._file.flush()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _widen(self, new: Sequence[str]) -> None:
        self._file.close()
        _, rows = self._read()
        self._columns = [*self._columns, *new]
        self._file = self._written(rows)

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """Columns and whole rows; the last one of a process that was killed may be cut off."""
        with self._path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if None not in row and None not in row.values()]
            return list(reader.fieldnames or ()), rows

    def _written(self, rows: Sequence[Mapping[str, str]]) -> IO[str]:
        def write(file: IO[str]) -> None:
            writer = csv.DictWriter(file, self._columns, restval="")
            if self._columns:
                writer.writeheader()
            writer.writerows(rows)

        return _replaced(self._path, write)


class ScalarWriter(Protocol):
    """What TensorBoard's `SummaryWriter` (and those made after it) has."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """One value."""


class TensorBoard:
    """Rows become scalars of a `SummaryWriter`, which stays the caller's to close."""

    def __init__(self, writer: ScalarWriter) -> None:
        self._writer = writer

    def write(self, step: int, values: Values) -> None:
        """Log every value of a step under its name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Nothing: whoever made it closes it."""


class WandbRun(Protocol):
    """What a run of Weights & Biases has."""

    def log(self, data: dict[str, float], step: int) -> object:
        """One row."""


class Wandb:
    """Rows are logged to a run of Weights & Biases (`wandb.init()`), which stays the caller's to finish."""

    def __init__(self, run: WandbRun) -> None:
        self._run = run

    def write(self, step: int, values: Values) -> None:
        """Log the values of a step in one call."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Nothing: whoever made it closes it."""


class Rates:
    """What happened since the last look, per second or per step. Owned by the thread that logs."""

    def __init__(self, engine: Counted) -> None:
        self._engine = engine
        self.counters: Values = engine.counters()
        self._taken_s = time.perf_counter()

    def take(self, *, steps: int = 1) -> dict[str, float]:
        """`step/...` of the `steps` steps since the last call; `counters` are those of now afterwards."""
        before, before_s = self.counters, self._taken_s
        self.counters, self._taken_s = self._engine.counters(), time.perf_counter()
        seconds = self._taken_s - before_s
        row = {"step/seconds": seconds / steps}
        for name, counter in _RATES.items():
            row[name] = _growth(before, self.counters, counter) / seconds
        return row | {"step/stall_s": _growth(before, self.counters, "stall/total_s") / steps}


class MetricsLog(Closing):
    """Writes a row to every sink after each step, or after every few.

    A sink that the system refuses a row (a full disk, a folder that is gone) is told in a warning and gets no more:
    training goes on.

    Args:
        engine: whose counters are logged.
        sinks: sinks, or files: `.jsonl`, `.csv`, or `.prom` for Prometheus' node exporter.
        every: rows are written after this many steps.
        first_step: number of the first step to come; of a run that goes on, files keep the rows of earlier steps.

    Raises:
        ConfigError: a file that cannot be written or of another kind.
    """

    def __init__(
        self, engine: Counted, sinks: Sequence[Sink | StrPath], *, every: int = 1, first_step: int = 0
    ) -> None:
        if every < 1:
            raise ConfigError(f"every={every}: rows are written after a number of steps, 1 or more")
        self._every = every
        self._step = first_step
        self._sinks: list[TolerantSink] = []
        try:
            for sink in sinks:
                if isinstance(sink, str | os.PathLike):
                    path = Path(sink)
                    self._sinks.append(TolerantSink(_sink_of(path, first_step), f"the log {path}"))
                else:
                    self._sinks.append(TolerantSink(sink, f"the log of {type(sink).__name__}"))
        except BaseException:
            self.close()
            raise
        self._rates, self._steps_since = Rates(engine), 0

    def step(self, **values: float) -> None:
        """A step is over.

        Args:
            values: what the loop knows, for example `loss=loss.item()`; of a tensor its one value is taken.
        """
        number, self._step = self._step, self._step + 1
        self._steps_since += 1
        if self._steps_since < self._every:
            return
        given = {name: number_of(value) for name, value in values.items()}
        row = {**given, **self._rates.take(steps=self._steps_since), **self._rates.counters}
        row.pop("step", None)  # of this engine; rows are numbered by the run
        self._steps_since = 0
        for sink in self._sinks:
            sink.write(number, row)

    def close(self) -> None:
        """Close files and servers, all of them, whatever goes wrong with one. Idempotent."""
        with ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close)


def number_of(value: float) -> float:
    """A number as Python's, also where it is given as a tensor or a scalar of NumPy, which no file takes."""
    item: Callable[[], float] | None = getattr(value, "item", None)
    return value if item is None else item()


def _growth(before: Values, now: Values, name: str) -> float:
    """How much a counter grew; `engine.adopt()` lets counters start again."""
    then, value = before.get(name, 0.0), now.get(name, 0.0)
    return value - then if value >= then else value


def _sink_of(path: Path, first_step: int) -> Sink:
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        return JsonLines(path, first_step=first_step)
    if suffix == ".csv":
        return Csv(path, first_step=first_step)
    if suffix == ".prom":
        from infinity.observe.prometheus import PrometheusFile

        return PrometheusFile(path)
    raise ConfigError(f"{path}: cannot tell what kind of metrics file this is; allowed: .jsonl, .csv, .prom")


def _step_of(line: str) -> float:
    """The step of a row; none comes before a line that is no row, such as the last one of a process that was killed."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _replaced(path: Path, write: Callable[[IO[str]], object]) -> IO[str]:
    """The file with new contents, open for what follows."""
    with replaced_file(path, newline="") as file:
        write(file)
    return path.open("a", newline="", encoding="utf-8")


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from error
