"""Records a training loop of one's own for `infinity report`, as `infinity train --record` does.

    with RunRecorder(optimizer, "run1") as recorder:
        for inputs, targets in batches:
            loss = model(inputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss.item())

The optimizer is one of infinity's: over an offloaded model, or over parameters whose state alone lies in the tiers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from infinity.bench.machine import describe_machine
from infinity.bridge.tier import StateTier
from infinity.config import WearAction
from infinity.engine import Engine
from infinity.errors import ConfigError, InfinityError
from infinity.json_text import json_text
from infinity.observe.counters import drive_facts
from infinity.observe.exporters import JsonLines, number_of
from infinity.observe.names import stalls_between
from infinity.observe.tolerant import TolerantSink
from infinity.optim.base import OffloadedOptimizer
from infinity.plan.wear_guard import WearGuard
from infinity.replacing import replaced_file
from infinity.report.ending import how_it_ended
from infinity.report.record import METRICS_FILE, RUN_FILE, TRACE_FILE, RunState
from storage.closing import Closing
from storage.paths import StrPath

_log = logging.getLogger(__name__)


class RunRecorder(Closing):
    """Writes a row for every step, and at the end the run and its trace. Used by the training thread.

    Close it before the engine or the optimizer; a block that fails is recorded as such. Of several ranks the first one
    writes.

    What the run writes to its drives goes into their ledger, also beside a `WearWatch`, and into the record. Training
    outlives its record: where the disk is full, or the folder is gone, the record ends with a warning.

    Args:
        optimizer: whose run it is.
        folder: to write to; it is made.
        first_step: number of the first step to come. If it is not 0, a record that is there is continued: rows of
            earlier steps stay in `metrics.jsonl`; the report's figures are of the steps since.

    Raises:
        ConfigError: the folder cannot be written.
    """

    def __init__(self, optimizer: OffloadedOptimizer, folder: StrPath, *, first_step: int = 0) -> None:
        source = optimizer.engine or optimizer.state_tier
        if source is None:
            raise ConfigError("the optimizer holds no parameters, so there is nothing to record")
        self._source: Engine | StateTier = source
        self._optimizer = optimizer
        self._folder = Path(folder)
        self._first_step = first_step
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._counters: Mapping[str, float] = source.counters()
        self._at_start = self._counters
        self._landed: Mapping[str, float] | None = None  # the same at the end, with all writes over
        self._rows: TolerantSink | None = None
        self._error: BaseException | None = None
        self._is_closed = False
        store = source._runtime.store if isinstance(source, Engine) else source.store
        self._wear = WearGuard.of_store(store, None, WearAction.WARN)
        if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
            self._rows = self._begin()
        self._began_s = time.perf_counter()

    def step(self, *, loss: float) -> None:
        """A step is over, with this loss; of a tensor its one value is taken, which waits for it.

        Raises:
            InfinityError: the recorder is closed.
        """
        if self._is_closed:
            raise InfinityError(f"the record of the run in {self._folder} is closed; make another RunRecorder")
        loss, now_s = number_of(loss), time.perf_counter()
        self._losses.append(loss)
        self._seconds.append(now_s - self._began_s)
        self._began_s, self._counters = now_s, self._source.counters()
        self._wear.step_ended()
        if self._rows is not None:
            row: dict[str, Any] = {"loss": loss, "step_seconds": self._seconds[-1], "counters": self._counters}
            self._rows.write(self._first_step + len(self._losses) - 1, row)

    def close(self) -> None:
        """Write what is left to write. Idempotent.

        Raises:
            InfinityError: the engine or the optimizer is closed already; the record has what the last step knew.
            IterationError, StorageError: the last writes failed, and so the run did, in its record too.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._error is None:
                self._measure_end()
        finally:
            self._end()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._error = error
        self.close()

    # Parts -----------------------------------------------------------------------------------------------------

    def _measure_end(self) -> None:
        """Wait for the last writes, which count too. Where one fails, so has the run."""
        is_closed = self._source.is_closed
        try:
            self._landed = self._source.metrics()
        except BaseException as error:
            self._error = None if is_closed else error
            raise

    def _end(self) -> None:
        if self._rows is not None:
            self._rows.close()
        wear = self._wear.report()
        if self._rows is None:
            return
        measured: dict[str, Any] = {
            "losses": self._losses,
            "step_seconds": self._seconds,
            "stalls": stalls_between(self._at_start, self._counters),
            "wear": [one.to_json() for one in wear],
        }
        measured |= {"state": RunState.FINISHED.value} if self._error is None else how_it_ended(self._error)
        try:
            self._write(measured)
            self._source.trace.write_chrome(self._folder / TRACE_FILE)
        except OSError as error:
            _log.warning("the record of the run in %s is not complete: %s", self._folder, error)

    def _begin(self) -> TolerantSink:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / TRACE_FILE).unlink(missing_ok=True)  # of an earlier run
            self._write({"state": RunState.RUNNING.value})
        except OSError as error:
            raise ConfigError(f"{self._folder}: cannot be written: {error.strerror or error}") from error
        rows = JsonLines(self._folder / METRICS_FILE, first_step=self._first_step)
        return TolerantSink(rows, f"the record of the run in {self._folder}")

    def _write(self, more: Mapping[str, Any]) -> None:
        begun = {
            "environment": describe_machine(),
            "first_step": self._first_step,
            "counters_at_start": self._at_start,
        }
        run = self._described() | begun | dict(more)
        with replaced_file(self._folder / RUN_FILE) as file:
            file.write(json_text(run, indent=1))

    def _described(self) -> dict[str, Any]:
        """The parts of a run that are the same from its beginning to its end, and what it moved."""
        source = self._source
        settings = {
            "optimizer": type(self._optimizer).__name__,
            "parameter_groups": [
                {name: repr(value) for name, value in group.items() if name != "params"}
                for group in self._optimizer.param_groups
            ],
        }
        if isinstance(source, Engine):
            plan = source.plan
            model = {"parameters": plan.parameters, "state_bytes": plan.state_bytes, "units": plan.units}
            budgets: dict[str, int] = {
                "device": plan.placement.device_budget_nbytes,
                "host": plan.placement.host_budget_nbytes,
                "nvme": plan.placement.nvme_nbytes,
            }
        else:
            model = {"parameters": source.parameters_numel, "state_bytes": source.state_nbytes, "units": 0}
            budgets = {"host": source.pool.capacity_nbytes, "nvme": source.plan.nvme_nbytes}
        counters = self._landed or self._counters
        moved = {f"nvme_{way}_bytes": counters.get(f"nvme/{way}_payload_bytes", 0) for way in ("read", "write")}
        return {
            "config": {"training": settings, "engine": source.config.model_dump(mode="json")},
            "model": model,
            "budgets": budgets,
            "traffic": {"total": moved},
            "drives": [drive_facts(drive) for drive in source.drives],
        }
