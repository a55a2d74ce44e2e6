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

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch.distributed as dist

from infinity.bench.machine import describe_machine
from infinity.bridge.tier import StateTier
from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.json_text import json_text
from infinity.observe.counters import by_prefix, drive_facts
from infinity.observe.shortages import report_of
from infinity.optim.base import OffloadedOptimizer
from infinity.report.record import METRICS_FILE, RUN_FILE, TRACE_FILE, RunState
from storage.closing import Closing
from storage.paths import StrPath


class RunRecorder(Closing):
    """Writes a row for every step, and at the end the run and its trace. Used by the training thread.

    Close it before the engine or the optimizer; a block that fails is recorded as such. Of several ranks the first one
    writes.

    Args:
        optimizer: whose run it is.
        folder: to write to; it is made.
        first_step: number of the first step to come.

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
        self._file: IO[str] | None = None
        self._error: BaseException | None = None
        if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
            self._file = self._opened()
            self._write(RunState.RUNNING, {"counters_at_start": self._counters})
        self._began_s = time.perf_counter()

    def step(self, *, loss: float) -> None:
        """A step is over, with this loss."""
        now_s = time.perf_counter()
        self._losses.append(loss)
        self._seconds.append(now_s - self._began_s)
        self._began_s, self._counters = now_s, self._source.counters()
        if self._file is not None:
            row = {
                "step": self._first_step + len(self._losses) - 1,
                "loss": loss,
                "step_seconds": self._seconds[-1],
                "counters": self._counters,
            }
            self._file.write(json_text(row) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Write what is left to write. Idempotent.

        Raises:
            InfinityError: the engine or the optimizer is closed already.
        """
        file, self._file = self._file, None
        if file is None:
            return
        file.close()
        measured: dict[str, Any] = {
            "losses": self._losses,
            "step_seconds": self._seconds,
            "stalls": by_prefix(self._counters, "stall/", "_s"),
        }
        if self._error is None:
            self._write(RunState.FINISHED, measured)
        else:
            told = {"message": f"{type(self._error).__name__}: {self._error}", "report": report_of(self._error)}
            self._write(RunState.FAILED, measured | {"error": told})
        self._source.trace.write_chrome(self._folder / TRACE_FILE)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._error = error
        self.close()

    # Parts -----------------------------------------------------------------------------------------------------

    def _opened(self) -> IO[str]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return (self._folder / METRICS_FILE).open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{self._folder}: cannot be written: {error.strerror or error}") from error

    def _write(self, state: RunState, more: Mapping[str, Any]) -> None:
        run = self._described() | {"environment": describe_machine(), "first_step": self._first_step, **more}
        text = json_text(run | {"state": state.value}, indent=1)
        (self._folder / RUN_FILE).write_text(text, encoding="utf-8")

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
        counters = source.counters() if self._error is not None else source.metrics()
        moved = {f"nvme_{way}_bytes": counters.get(f"nvme/{way}_payload_bytes", 0) for way in ("read", "write")}
        return {
            "config": {"training": settings, "engine": source.config.model_dump(mode="json")},
            "model": model,
            "budgets": budgets,
            "traffic": {"total": moved},
            "drives": [drive_facts(drive) for drive in source.drives],
        }
