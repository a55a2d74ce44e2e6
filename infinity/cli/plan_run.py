"""`infinity plan`, from options to tables and files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.cli.console import make_console
from infinity.cli.plan_tables import changes_table, nearest_text, plan_tables, search_table, stages_table, sweep_table
from infinity.config import Precision, Schedule
from infinity.errors import ConfigError, PlacementError
from infinity.models.gpt import GptShape
from infinity.models.presets import PRESETS
from infinity.plan import advice as advise
from infinity.plan.hardware import CPU, Hardware, effective_link, from_bench, gpu_named, parse_drives
from infinity.plan.model import ModelPlan, model_plan
from infinity.plan.planner import PlanRequest, StepPlan, Workload, make_plan
from infinity.plan.report import change_json, plan_json, stages_json, sweep_json
from infinity.plan.stages import stage_rows
from infinity.plan.timeline import chrome_trace, graph_objects, timeline_figure, write_page
from infinity.sizes import GIB, MIB, parse_nbytes

_DEFAULT_DRIVE = "990pro-4tb"
_DEFAULT_HOST_NBYTES = 64 * GIB
_DEFAULT_SEQ, _DEFAULT_BATCH = 1024, 4


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of the command, as typed; None where not given."""

    model: str | None
    preset: str
    layers: int | None
    hidden: int | None
    heads: int | None
    seq: int | None
    batch: int | None
    accumulate: int
    precision: str
    schedule: str
    recompute: bool
    gpu: str
    gpus: int
    nodes: int
    device_memory: str | None
    host_memory: str | None
    drives: tuple[str, ...]
    bench: Path | None
    dram: float | None
    link: float | None
    network: float | None
    efficiency: float | None
    search: bool
    sweep: str | None
    stages: bool
    advice: bool
    json: Path | None
    html: Path | None
    trace: Path | None


def run(options: PlanOptions) -> None:
    """Plan, show, write.

    Raises:
        ConfigError: an option is not allowed or a file cannot be written.
        PlacementError: nothing fits; the nearest plan that works has been shown.
    """
    _check_outputs(options)
    console = make_console()
    request = make_request(options)
    result: dict[str, Any] = {}
    figures: list[Any] = []
    if options.stages:
        rows = stage_rows(request.model.parameters, request.hardware.ranks, largest_unit=_largest_unit(request.model))
        console.print(stages_table(rows, request))
        result["stages"] = stages_json(rows)
    elif options.sweep is not None:
        figures += _sweep(request, options.sweep, console, result)
    elif options.search:
        found = advise.search(request)
        console.print(search_table(found))
        result["search"] = [change_json(change) for change in found]
    else:
        plan = _plan(request, options, console)
        result |= plan_json(plan)
        console.print(plan_tables(plan))
        if options.advice:
            gains = advise.gains(plan, advise.what_to_change(request))
            console.print(changes_table(gains))
            result["changes"] = [change_json(change, plan) for change, _ in gains]
        figures.append(plan)
    _write(options, result, figures)


def make_request(options: PlanOptions) -> PlanRequest:
    """What the options ask for.

    Raises:
        ConfigError: a value is not allowed.
    """
    precision = _member(Precision, "--precision", options.precision)
    schedule = _member(Schedule, "--schedule", options.schedule)
    if schedule is Schedule.OVERLAPPED and options.accumulate > 1:
        raise ConfigError("--schedule overlapped contradicts --accumulate: it updates each unit at its first gradient")
    source, batch, seq = _source(options)
    model = model_plan(
        source,
        seq=seq,
        batch=1,
        activation_itemsize=2 if precision is Precision.BF16 else 4,
        resident_threshold_nbytes=MIB,
    )
    workload = Workload(
        batch=batch,
        accumulate=options.accumulate,
        precision=precision,
        schedule=schedule,
        recompute=options.recompute,
    )
    return PlanRequest(model, _hardware(options), workload)


def _member(kind: Any, option: str, value: str) -> Any:
    names = [member.value for member in kind]
    if value not in names:
        raise ConfigError(f"{option} {value}: allowed: {', '.join(names)}")
    return kind(value)


def _source(options: PlanOptions) -> tuple[GptShape | str, int, int]:
    """The shape of our own model or the name of another one; micro-batch and sequence."""
    if options.model is not None:
        return options.model, options.batch or _DEFAULT_BATCH, options.seq or _DEFAULT_SEQ
    if options.preset not in PRESETS:
        raise ConfigError(f"--preset {options.preset}: unknown; allowed: {', '.join(PRESETS)}")
    preset = PRESETS[options.preset]
    hidden = options.hidden or preset.hidden
    heads = options.heads or next(n for n in range(max(hidden // 64, 1), 0, -1) if hidden % n == 0)
    if hidden % heads:
        raise ConfigError(f"--hidden {hidden} --heads {heads}: hidden must be a multiple of heads")
    seq = options.seq or preset.seq
    return GptShape(options.layers or preset.layers, hidden, heads, seq), options.batch or _DEFAULT_BATCH, seq


def _hardware(options: PlanOptions) -> Hardware:
    gpu = CPU if options.gpu == "cpu" else gpu_named(options.gpu)
    if options.device_memory is not None:
        gpu = replace(gpu, memory_nbytes=_size("--device-memory", options.device_memory))
    hardware = Hardware(
        gpu=gpu,
        drives=parse_drives(options.drives or (_DEFAULT_DRIVE,)),
        host_memory_nbytes=_DEFAULT_HOST_NBYTES,
        gpus=options.gpus,
        nodes=options.nodes,
        link_bytes_per_s=effective_link(gpu),
        has_gpu=gpu.name != CPU.name,
    )
    if options.bench is not None:
        hardware = from_bench(options.bench, hardware)
        if options.drives:
            hardware = replace(hardware, drives=parse_drives(options.drives))
    changes: dict[str, Any] = {
        "dram_bytes_per_s": _rate("--dram", options.dram),
        "link_bytes_per_s": _rate("--link", options.link),
        "network_bytes_per_s": _rate("--network", options.network),
        "efficiency": options.efficiency,
        "host_memory_nbytes": None if options.host_memory is None else _size("--host-memory", options.host_memory),
    }
    return replace(hardware, **{name: value for name, value in changes.items() if value is not None})


def _rate(option: str, gigabytes_per_s: float | None) -> float | None:
    if gigabytes_per_s is not None and not gigabytes_per_s > 0:
        raise ConfigError(f"{option} {gigabytes_per_s}: it must be greater than 0")
    return None if gigabytes_per_s is None else gigabytes_per_s * 1e9


def _size(option: str, text: str) -> int:
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from None


def _largest_unit(model: ModelPlan) -> int:
    return max(sum(entry.parameter.numel() for entry in spec.own) for spec in model.specs)


def _plan(request: PlanRequest, options: PlanOptions, console: Console) -> StepPlan:
    """The plan; when nothing fits, the nearest one that does is shown before the error is raised."""
    keeps_spans = options.html is not None or options.trace is not None
    try:
        return make_plan(request, keep_spans=keeps_spans)
    except PlacementError as error:
        nearest = advise.nearest_that_works(request)
        if options.json is not None:
            told = None if nearest is None else change_json(nearest)
            _write_text(options.json, "--json", {"fits": False, "problem": str(error), "nearest": told})
        raise PlacementError(f"{error}\n{nearest_text(nearest)}") from None


def _sweep(request: PlanRequest, text: str, console: Console, result: dict[str, Any]) -> list[Any]:
    swept = advise.sweep(request, text)
    console.print(sweep_table(swept))
    result["sweep"] = sweep_json(swept)
    return [swept]


# Files --------------------------------------------------------------------------------------------------------------


def _check_outputs(options: PlanOptions) -> None:
    for name, path in (("--json", options.json), ("--html", options.html), ("--trace", options.trace)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ConfigError(f"{name} {path}: give the name of a file in a folder that exists")
    is_one_step = not (options.stages or options.search or options.sweep is not None)
    if options.trace is not None and not is_one_step:
        raise ConfigError("--trace shows one step; leave out --stages, --search and --sweep")
    if options.html is not None:
        if options.stages or options.search:
            raise ConfigError("--html shows one step or a --sweep; leave out --stages and --search")
        graph_objects()


def _write(options: PlanOptions, result: dict[str, Any], figures: Sequence[Any]) -> None:
    if options.json is not None:
        _write_text(options.json, "--json", result)
    for shown in figures:
        if options.html is not None:
            figure, title = _figure(shown)
            write_page(options.html, title, [figure])
        if options.trace is not None and isinstance(shown, StepPlan):
            _write_text(options.trace, "--trace", chrome_trace(shown.simulated.spans))


def _figure(shown: StepPlan | advise.Sweep) -> tuple[Any, str]:
    if isinstance(shown, StepPlan):
        title = f"One step of {shown.request.model.name} on {shown.request.hardware.describe()}: {shown.step_s:.3f} s"
        return timeline_figure(shown.simulated.spans, title), title
    figure = graph_objects().Figure()
    values = [v for v, point in zip(shown.values, shown.points, strict=True) if point.plan is not None]
    plans = [point.plan for point in shown.points if point.plan is not None]
    readers: list[tuple[str, Callable[[StepPlan], float]]] = [
        ("predicted", lambda plan: plan.step_s),
        ("lower bound", lambda plan: plan.bound_s),
    ]
    for name, read in readers:
        figure.add_scatter(name=name, x=values, y=[read(plan) for plan in plans], mode="lines+markers")
    title = f"Seconds per step by {shown.name}"
    figure.update_layout(title=title, xaxis_title=shown.name, yaxis_title="seconds", yaxis_rangemode="tozero")
    return figure, title


def _write_text(path: Path, option: str, content: dict[str, Any] | str) -> None:
    text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror or error}") from error
