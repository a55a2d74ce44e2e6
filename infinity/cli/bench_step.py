"""`infinity bench step`: one training step beside what each resource needs for it by itself.

The bound of a step is what its slowest resource needs alone: the plain model's forward and backward in memory, the
drives for the step's bytes, the link for those that go to the device and back, the optimizer's kernel for its elements.
They are measured in turns with the steps, so that a machine that gets slower is slower for all of them. On a CPU,
computing, the optimizer, copies into "device memory" and what drives cost the processors (checksums, system calls)
share the cores, so what they need together, spread over all cores, is a bound too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import torch
from rich.table import Table

from infinity.bench.link import LinkCopies
from infinity.bench.step_account import COMPUTE, LINK, NVME, OPTIMIZER, Activity, StepResult, activities
from infinity.bench.step_io import StepTraffic
from infinity.cli.bench_options import StepOptions
from infinity.cli.console import make_console
from infinity.cli.files import check_files, write_json
from infinity.cli.loop import BETAS, WEIGHT_DECAY, accumulate_gradients, batches_of, load_training_text
from infinity.cli.memory import check_activations
from infinity.cli.settings import RunSettings, resolve
from infinity.cli.train_options import TrainOptions
from infinity.data.batches import Batches
from infinity.empty import empty_init
from infinity.engine import Engine
from infinity.models.gpt import Gpt, init_weights
from infinity.observe.metrics import metrics_of
from infinity.observe.names import stalls_between
from infinity.offloading import offload
from infinity.optim.adamw import AdamW
from infinity.optim.hyper import AdamWHyper, Piece
from infinity.plan.bounds import moved_nbytes
from infinity.runtime import Runtime
from infinity.swap_directories import swap_directories
from infinity.swap_files import storage_options

_KERNEL_NUMEL = 1 << 22
_SHOWN_S = 5e-5
_HYPER = AdamWHyper(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def run(options: StepOptions) -> None:
    """Measure, show, and write what was asked for.

    Raises:
        ConfigError: an option cannot work; nothing was measured.
        InfinityError, StorageError: the run failed.
    """
    check_files(json=options.json)
    known = {field.name for field in fields(TrainOptions)} - {"json"}
    shared = {field.name: getattr(options, field.name) for field in fields(options) if field.name in known}
    report = measure(resolve(TrainOptions(**shared)), rounds=options.rounds, compares_plain=options.plain)
    make_console().print(_table(report))
    write_json(options.json, report)


def measure(settings: RunSettings, *, rounds: int, compares_plain: bool) -> dict[str, Any]:
    """Steps and each resource alone, in turns."""
    training, result = settings.training, StepResult()
    check_activations(training)
    batches = batches_of(training, load_training_text(training))
    with ExitStack() as stack:
        directories = stack.enter_context(swap_directories(settings.config.nvme.paths))
        config = settings.config.with_(nvme={"paths": list(directories)})
        with empty_init():
            model = Gpt(training.shape, recompute=training.recompute)
        torch.manual_seed(training.seed)
        engine = stack.enter_context(offload(model, config, init_fn=init_weights))
        optimizer = AdamW(
            model.parameters(), lr=training.lr, betas=BETAS, weight_decay=WEIGHT_DECAY, max_grad_norm=training.clip
        )
        steps = _Steps(settings, engine, model, optimizer, batches)
        steps.take(2)  # the first reads no state, the second is the first of its kind
        traffic = engine.plan.expected_traffic(1, training.accumulate)
        read_nbytes, write_nbytes = moved_nbytes(traffic)
        drives = None
        if read_nbytes + write_nbytes:
            drives = StepTraffic(directories, storage_options(config.nvme), read_nbytes, write_nbytes)
            stack.callback(drives.close)
        plain = _Plain(settings, batches) if compares_plain else None
        link = LinkCopies(engine._runtime.device.torch_device)
        transfers_cpu_s: list[float] = []
        for _ in range(rounds):
            steps.measure(result)
            if drives is not None:
                engine.metrics()  # nothing of the run is under way while the drives are measured
                cost = drives.measure()
                result.alone_s.setdefault(NVME, []).append(cost.elapsed_s)
                transfers_cpu_s.append(cost.cpu_s)
            if plain is not None:
                result.alone_s.setdefault(COMPUTE, []).append(plain.measure())
            result.alone_s.setdefault(LINK, []).append(link.measure(*steps.link_nbytes))
            result.alone_s.setdefault(OPTIMIZER, []).append(_kernel_s(engine._runtime))
        if plain is not None and not training.uses_cuda:
            _add_processors(result, transfers_cpu_s)
        placement = engine.plan.placement
        return {
            "parameters": engine.plan.parameters,
            "schedule": placement.schedule.value,
            "tokens_per_step": training.tokens_per_step,
            "nvme_read_bytes": read_nbytes,
            "nvme_write_bytes": write_nbytes,
            "h2d_bytes": steps.link_nbytes[0],
            "d2h_bytes": steps.link_nbytes[1],
            "host_budget_bytes": placement.host_budget_nbytes,
            "io_engine": engine.io_engine,
            "rounds": rounds,
            "transfers_cpu_seconds": statistics.median(transfers_cpu_s) if transfers_cpu_s else 0.0,
        } | result.to_json()


def _add_processors(result: StepResult, transfers_cpu_s: Sequence[float]) -> None:
    """What has to run on the cores that compute; copies and drives at their best use all of them equally."""
    together = zip(result.alone_s[COMPUTE], result.alone_s[OPTIMIZER], strict=True)
    working_s = [sum(pair) for pair in together]
    result.alone_s["compute and optimizer on the CPU"] = working_s
    drives_s = [cpu_s / torch.get_num_threads() for cpu_s in transfers_cpu_s] or [0.0] * len(working_s)
    every = zip(working_s, result.alone_s[LINK], drives_s, strict=True)
    result.alone_s["compute, optimizer and transfers on the CPU"] = [sum(parts) for parts in every]


class _Steps:
    """Steps of an engine.

    Attributes:
        link_nbytes: copied to the device and back in one of those that were measured last.
    """

    def __init__(
        self, settings: RunSettings, engine: Engine, model: torch.nn.Module, optimizer: AdamW, batches: Batches
    ) -> None:
        self._settings, self._engine, self._model = settings, engine, model
        self._optimizer, self._batches = optimizer, batches
        self._device = torch.device("cuda" if settings.training.uses_cuda else "cpu")
        self._step = 0
        self.link_nbytes = (0, 0)

    def take(self, count: int) -> None:
        """Steps that are not measured."""
        for _ in range(count):
            accumulate = self._settings.training.accumulate
            accumulate_gradients(self._model, self._batches, self._step, accumulate, self._device)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._step += 1

    def measure(self, result: StepResult) -> None:
        """One step that gets the pipeline going again, and two that count, as their mean."""
        self.take(1)
        runtime = self._engine._runtime
        before, started_s = metrics_of(runtime), time.perf_counter()
        self.take(2)
        ended_s = time.perf_counter()
        result.step_s.append((ended_s - started_s) / 2)
        after = metrics_of(runtime)
        self._engine.metrics()  # what was under way at the end is noted when it is over
        names = ("link/h2d_bytes", "link/d2h_bytes", "link/shared_bytes")
        h2d, d2h, shared = (int(after[name] - before[name]) // 2 for name in names)
        self.link_nbytes = h2d - shared, d2h
        found = activities(runtime.trace.events(), started_s, ended_s)
        result.activities.append({name: Activity(one.busy_s / 2, one.waiting_s / 2) for name, one in found.items()})
        for cause, seconds in stalls_between(before, after).items():
            if cause != "total":
                result.stalls_s.setdefault(cause, []).append(seconds / 2)


class _Plain:
    """Forward and backward of the same model in memory, without an optimizer."""

    def __init__(self, settings: RunSettings, batches: Batches) -> None:
        training = settings.training
        self._device = torch.device("cuda" if training.uses_cuda else "cpu")
        with empty_init():
            model = Gpt(training.shape, recompute=training.recompute)
        self._model = model.to_empty(device=self._device)
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.normal_(std=0.02)
        self._accumulate, self._batches = training.accumulate, batches
        self._run()

    def measure(self) -> float:
        started_s = time.perf_counter()
        self._run()
        return time.perf_counter() - started_s

    def _run(self) -> None:
        accumulate_gradients(self._model, self._batches, 0, self._accumulate, self._device)
        self._model.zero_grad(set_to_none=True)


def _kernel_s(runtime: Runtime) -> float:
    """Seconds of the optimizer's kernel for all elements that train, from a few million of them."""
    kernel = runtime.kernel
    param = torch.ones(_KERNEL_NUMEL, dtype=kernel.param_dtype)
    grad = torch.full((_KERNEL_NUMEL,), 1e-3)
    state = [torch.zeros(f.numel(_KERNEL_NUMEL), dtype=f.dtype) for f in kernel.fields]
    kernel.begin(param, state)
    pieces = [Piece(0, _KERNEL_NUMEL, 1, _HYPER)]
    kernel.update(param, grad, state, pieces, None)
    started_s = time.perf_counter()
    kernel.update(param, grad, state, pieces, None)
    seconds = time.perf_counter() - started_s
    return seconds / _KERNEL_NUMEL * sum(g.layout.payload_numel for g in runtime.groups if g.trainable)


def _table(report: dict[str, Any]) -> Table:
    table = Table(title=f"{report['parameters']:,} parameters, schedule {report['schedule']}", title_justify="left")
    table.add_column("")
    table.add_column("seconds", justify="right")
    step = report["step_seconds"]
    table.add_row("step, median", f"{step['median']:.4f}  ({step['min']:.4f} to {step['max']:.4f})")
    for name, seconds in report["bounds_seconds"].items():
        table.add_row(f"{name} alone", f"{seconds:.4f}")
    for name, seconds in report["in_step_seconds"].items():
        table.add_row(f"{name} in the step", f"{seconds:.4f}")
    rows: dict[str, float] = report["difference_seconds"]["by_cause"]
    for cause, seconds in report["stalls_seconds"].items():
        if seconds >= _SHOWN_S and cause not in rows:
            table.add_row(f"waiting in the step: {cause}", f"{seconds:.4f}")
    table.add_row("step / bound", f"{report['ratio']:.3f}  ({report['binding']} binds)", style="bold")
    for cause, seconds in rows.items():
        if abs(seconds) >= _SHOWN_S:
            table.add_row(f"  beyond: {cause}", f"{seconds:+.4f}")
    table.add_row("  together (of the mean)", f"{report['difference_seconds']['total']:+.4f}")
    return table
