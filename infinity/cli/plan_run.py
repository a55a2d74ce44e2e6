"""`infinity plan`, from options to tables and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.bench.machine import describe_machine
from infinity.cli.console import make_console
from infinity.cli.files import check_files, write_json, write_text
from infinity.cli.plan_options import PlanOptions
from infinity.cli.plan_tables import (
    changes_table,
    nearest_text,
    plan_tables,
    replay_table,
    search_table,
    stages_table,
    sweep_table,
)
from infinity.cli.shapes import preset_named, shape_of
from infinity.config import OptimizerKind, Precision, Schedule, StateFormat, refuse_state_format
from infinity.errors import ConfigError, PlacementError
from infinity.models.gpt import GptShape
from infinity.plan import advice as advise
from infinity.plan.calibration import CalibrationFile
from infinity.plan.hardware import (
    CPU,
    Hardware,
    effective_link,
    from_bench,
    gpu_named,
    parse_drives,
    parse_link,
    rate_of,
)
from infinity.plan.model import ModelPlan, model_plan
from infinity.plan.planner import PlanRequest, StepPlan, Workload, make_plan
from infinity.plan.ranks import PlannedDevice
from infinity.plan.report import change_json, plan_json, stages_json, sweep_json
from infinity.plan.simulate import simulate_long
from infinity.plan.stages import stage_rows
from infinity.plan.timeline import chrome_trace
from infinity.report.document import graph_objects
from infinity.report.plan_page import plan_page, sweep_figure, timeline_figure
from infinity.sizes import GIB, MIB, parse_nbytes

_DEFAULT_GPU, _DEFAULT_DRIVE = "rtx4090", "990pro-4tb"
_DEFAULT_HOST_NBYTES = 64 * GIB
_DEFAULT_SEQ, _DEFAULT_BATCH = 1024, 4


def run(options: PlanOptions) -> None:
    """Plan, show, write.

    Raises:
        ConfigError: an option is not allowed or a file cannot be written.
        PlacementError: nothing fits; the nearest plan that works has been shown.
    """
    _check_options(options)
    console = make_console()
    if options.calibrate:
        from infinity.cli.plan_calibrate import calibrate

        write_json(options.json, calibrate(options, console))
        return
    if options.replay is not None:
        _replay(options.replay, options, console)
        return
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
        plan, changes = _plan(request, options, console)
        result |= plan_json(plan)
        if changes is not None:
            gains = advise.gains(plan, changes)
            console.print(changes_table(gains))
            result["changes"] = [change_json(change, plan) for change, _ in gains]
        figures.append(plan)
    _write(options, result, figures)


def make_request(options: PlanOptions) -> PlanRequest:
    """What the options ask for.

    Raises:
        ConfigError: a value is not allowed.
    """
    precision = _member(Precision, "--precision", options.precision or Precision.BF16.value)
    state_format = _member(StateFormat, "--state-format", options.state_format or StateFormat.FP32.value)
    refuse_state_format(state_format, precision, OptimizerKind.ADAMW)
    schedule = _member(Schedule, "--schedule", options.schedule or Schedule.AUTO.value)
    accumulate = options.accumulate or 1
    if schedule is Schedule.OVERLAPPED and accumulate > 1:
        raise ConfigError("--schedule overlapped contradicts --accumulate: it updates each unit at its first gradient")
    if schedule is Schedule.OVERLAPPED and precision is Precision.FP16:
        raise ConfigError("--schedule overlapped contradicts --precision fp16: an overflow may skip the whole step")
    source, batch, seq = _source(options)
    hardware = _hardware(options)
    micro_batches = options.micro_batches or 1
    if micro_batches > batch:
        raise ConfigError(f"--micro-batches {micro_batches}: a batch of {batch} samples cannot be cut so often")
    model = model_plan(
        source,
        seq=seq,
        batch=1,
        activation_itemsize=PlannedDevice(is_gpu=hardware.has_gpu).compute_dtype(precision).itemsize,
        resident_threshold_nbytes=MIB,
    )
    workload = Workload(
        batch=batch,
        accumulate=accumulate,
        micro_batches=micro_batches,
        precision=precision,
        state_format=state_format,
        schedule=schedule,
        recompute=options.recompute is not False,
    )
    return PlanRequest(model, hardware, workload)


def _member(kind: Any, option: str, value: str) -> Any:
    names = [member.value for member in kind]
    if value not in names:
        raise ConfigError(f"{option} {value}: allowed: {', '.join(names)}")
    return kind(value)


def _source(options: PlanOptions) -> tuple[GptShape | str, int, int]:
    """The shape of our own model or the name of another one; micro-batch and sequence."""
    if options.model is not None:
        return options.model, options.batch or _DEFAULT_BATCH, options.seq or _DEFAULT_SEQ
    preset = preset_named(options.preset)
    shape = shape_of(preset, layers=options.layers, hidden=options.hidden, heads=options.heads, seq=options.seq)
    return shape, options.batch or _DEFAULT_BATCH, shape.seq


def _hardware(options: PlanOptions) -> Hardware:
    """This machine where it is asked for or nothing else is, else what options and tables say."""
    hardware = _this_machine(options) or _named(options)
    if options.bench is not None:
        hardware = from_bench(options.bench, hardware)
    if options.drive:
        hardware = replace(hardware, drives=parse_drives(options.drive))
    if options.device_memory is not None:
        memory_nbytes = _size("--device-memory", options.device_memory)
        hardware = replace(hardware, gpu=replace(hardware.gpu, memory_nbytes=memory_nbytes))
    changes: dict[str, Any] = {
        "dram_bytes_per_s": None if options.dram is None else rate_of("--dram", options.dram),
        "link_bytes_per_s": None if options.link is None else parse_link(options.link),
        "network_bytes_per_s": None if options.network is None else rate_of("--network", options.network),
        "efficiency": options.efficiency,
        "host_memory_nbytes": None if options.host_memory is None else _size("--host-memory", options.host_memory),
    }
    return replace(hardware, **{name: value for name, value in changes.items() if value is not None})


def _this_machine(options: PlanOptions) -> Hardware | None:
    """The calibrated machine; None where it is not asked for.

    Raises:
        ConfigError: it is asked for and has not been calibrated, or another GPU is given as well.
    """
    if options.here and options.gpu is not None:
        raise ConfigError(f"--here contradicts --gpu {options.gpu}: this machine has its own; leave one of them out")
    given = (options.gpu, options.device_memory, options.host_memory, options.bench, options.efficiency)
    rates = (options.dram, options.link, options.network)
    is_named = any(value is not None for value in (*given, *rates)) or options.drive
    if not options.here and (is_named or options.gpus > 1 or options.nodes > 1):
        return None
    found = CalibrationFile(describe_machine()).load()
    if found is None and options.here:
        raise ConfigError("--here: this machine has not been calibrated; run `infinity plan --calibrate` first")
    return None if found is None else replace(found.hardware(), gpus=options.gpus, nodes=options.nodes)


def _named(options: PlanOptions) -> Hardware:
    """Hardware from the tables."""
    gpu = CPU if options.gpu == "cpu" else gpu_named(options.gpu or _DEFAULT_GPU)
    return Hardware(
        gpu=gpu,
        drives=parse_drives((_DEFAULT_DRIVE,)),
        host_memory_nbytes=_DEFAULT_HOST_NBYTES,
        gpus=options.gpus,
        nodes=options.nodes,
        link_bytes_per_s=effective_link(gpu),
        has_gpu=gpu.name != CPU.name,
    )


def _size(option: str, text: str) -> int:
    try:
        nbytes = parse_nbytes(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from None
    if nbytes == 0:
        raise ConfigError(f"{option} {text}: it must be greater than 0")
    return nbytes


def _largest_unit(model: ModelPlan) -> int:
    return max(sum(entry.parameter.numel() for entry in spec.own) for spec in model.specs)


def _plan(request: PlanRequest, options: PlanOptions, console: Console) -> tuple[StepPlan, list[advise.Change] | None]:
    """The plan, shown as soon as it is made, with what to change where that is wanted.

    When nothing fits, the error tells the nearest plan that does.
    """
    keeps_spans = options.html is not None or options.trace is not None

    def show(plan: StepPlan) -> None:
        console.print(plan_tables(plan))

    try:
        if options.advice:
            return advise.plan_with_changes(request, keep_spans=keeps_spans, on_plan=show)
        plan = make_plan(request, keep_spans=keeps_spans)
        show(plan)
        return plan, None
    except PlacementError as error:
        nearest = advise.nearest_that_works(request)
        told = None if nearest is None else change_json(nearest)
        write_json(options.json, {"fits": False, "problem": str(error), "nearest": told})
        raise PlacementError(f"{error}\n{nearest_text(nearest)}") from None


def _replay(path: Path, options: PlanOptions, console: Console) -> None:
    from infinity.plan.scheduler_trace import read_trace, replay_json  # loads the engine

    trace = read_trace(path)
    drives = [drive.model for drive in parse_drives(options.drive)]
    try:
        simulated = simulate_long(trace.scenario(drives), keep_spans=True)
    except Exception as error:  # of any kind: a file that somebody changed may say anything
        raise ConfigError(f"--replay {path}: what it says cannot be simulated: {error}") from error
    moved = (simulated.read_nbytes, simulated.write_nbytes)
    console.print(replay_table(trace, simulated.step_s, moved, simulated.stalls_s, has_other_drives=bool(drives)))
    write_json(options.json, replay_json(trace, simulated.step_s, moved, simulated.stalls_s))
    title = f"One step of {path.name}, replayed: {simulated.step_s:.3f} s"
    if options.html is not None:
        write_text("--html", options.html, plan_page(title, "Timeline", timeline_figure(simulated.spans)))
    if options.trace is not None:
        write_text("--trace", options.trace, chrome_trace(simulated.spans))


def _sweep(request: PlanRequest, text: str, console: Console, result: dict[str, Any]) -> list[Any]:
    swept = advise.sweep(request, text)
    console.print(sweep_table(swept))
    result["sweep"] = sweep_json(swept)
    return [swept]


# Files --------------------------------------------------------------------------------------------------------------


def _check_options(options: PlanOptions) -> None:
    """Refuse what contradicts or would be left out without a word, before anything takes time."""
    modes = {
        "--calibrate": options.calibrate,
        "--replay": options.replay is not None,
        "--search": options.search,
        "--stages": options.stages,
        "--sweep": options.sweep is not None,
    }
    given = [name for name, is_given in modes.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: each shows something of its own; leave out all but one")
    if options.nvme and not options.calibrate:
        raise ConfigError("--nvme names what --calibrate measures; the drives of a plan are given with --drive")
    sizes = {"--layers": options.layers, "--hidden": options.hidden, "--heads": options.heads}
    if options.model is not None and (unused := [name for name, size in sizes.items() if size is not None]):
        raise ConfigError(f"--model {options.model} has sizes of its own; leave out {', '.join(unused)}")
    _check_outputs(options, given[0] if given else None)


def _check_outputs(options: PlanOptions, mode: str | None) -> None:
    check_files(json=options.json, html=options.html, trace=options.trace)
    if options.trace is not None and mode not in (None, "--replay"):
        raise ConfigError(f"--trace shows one step; leave out {mode}")
    if options.html is not None:
        if mode not in (None, "--replay", "--sweep"):
            raise ConfigError(f"--html shows one step or a --sweep; leave out {mode}")
        graph_objects()


def _write(options: PlanOptions, result: dict[str, Any], figures: Sequence[Any]) -> None:
    write_json(options.json, result)
    for shown in figures:
        if options.html is not None:
            write_text("--html", options.html, _page(shown))
        if options.trace is not None and isinstance(shown, StepPlan):
            write_text("--trace", options.trace, chrome_trace(shown.simulated.spans))


def _page(shown: StepPlan | advise.Sweep) -> str:
    if isinstance(shown, StepPlan):
        title = f"One step of {shown.request.model.name} on {shown.request.hardware.describe()}: {shown.step_s:.3f} s"
        return plan_page(title, "Timeline", timeline_figure(shown.simulated.spans))
    plans = {v: point.plan for v, point in zip(shown.values, shown.points, strict=True) if point.plan is not None}
    seconds = {"predicted": [p.step_s for p in plans.values()], "lower bound": [p.bound_s for p in plans.values()]}
    title = f"Seconds per step by {shown.name}"
    return plan_page(title, "Sweep", sweep_figure(shown.name, list(plans), seconds))
