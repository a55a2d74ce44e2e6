"""What `infinity train` was asked to do, resolved: preset, options, settings file and derived budgets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from infinity.cli.continued import continue_with, find_continued
from infinity.cli.ranks import this_job
from infinity.cli.shapes import preset_named, shape_of
from infinity.cli.sizing import comfortable_budgets, minima_of
from infinity.cli.train_options import TrainOptions
from infinity.cli.values import check_finite
from infinity.config import ActivationPolicy, Config, DeviceKind, Durability, Precision, Schedule, read_settings
from infinity.durable.notes import StoredRun
from infinity.errors import ConfigError
from infinity.models.gpt import Block, GptShape
from infinity.models.presets import DEFAULT_PRESET, Preset
from infinity.plan.scheduler_trace import LEAST_STEPS
from infinity.sizes import parse_nbytes


@dataclass(frozen=True, slots=True)
class Training:
    """What a training loop needs to know, offloaded or plain; travels to the baseline's process as JSON."""

    shape: GptShape
    batch: int
    accumulate: int
    micro_batches: int  # slices of a batch, added up like accumulated batches
    steps: int
    seed: int
    lr: float
    clip: float | None
    recompute: bool
    data: tuple[str, ...]
    device: str  # "cpu", "cuda" or "fake": where the offloaded run computes

    @property
    def uses_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks together."""
        return self.batch * self.accumulate * self.shape.seq * this_job().size


@dataclass(frozen=True, slots=True)
class RunSettings:
    """A run, ready to start.

    Attributes:
        notes: decisions made for the user, in words.
        continues: the run with durable steps that is gone on with, if any.
    """

    options: TrainOptions
    training: Training
    config: Config
    notes: tuple[str, ...] = field(default=())
    continues: StoredRun | None = None


def resolve(options: TrainOptions) -> RunSettings:
    """Put a run's settings together: options first, then the settings file, then the preset.

    Raises:
        ConfigError: a value is not allowed, or two of them contradict each other.
    """
    run = find_continued(options)
    if run is not None:
        options = continue_with(options, run)
    options = replace(options, preset=options.preset or DEFAULT_PRESET)
    preset = preset_named(options.preset)
    shape = shape_of(preset, layers=options.layers, hidden=options.hidden, heads=options.heads, seq=options.seq)
    _check_durability(options)
    _check_ranks(options)
    check_finite(lr=options.lr)
    accumulate = options.accumulate or 1
    if options.clip is not None and not options.clip > 0:
        raise ConfigError(f"--clip {options.clip}: it must be greater than 0; leave it out not to clip")
    config = _engine_config(options)
    _check_directories(config)
    config, schedule_note = _choose_schedule(config, options)
    if options.scheduler_trace is not None and (options.steps or preset.steps) < LEAST_STEPS:
        raise ConfigError(f"--scheduler-trace needs --steps {LEAST_STEPS} or more: the first step is left out")
    kind = config.device.kind
    if kind is DeviceKind.AUTO:
        kind = DeviceKind.CUDA if torch.cuda.is_available() else DeviceKind.CPU
    training = Training(
        shape=shape,
        batch=options.batch or preset.batch,
        accumulate=accumulate,
        micro_batches=config.micro_batches,
        steps=options.steps or preset.steps,
        seed=options.seed or 0,
        lr=options.lr if options.lr is not None else preset.lr,
        clip=options.clip,
        recompute=_recomputes(options, preset, config),
        data=tuple(map(str, options.data)),
        device=kind.value,
    )
    is_preset = (shape.layers, shape.hidden, shape.seq) == (preset.layers, preset.hidden, preset.seq)
    config, budget_note = _choose_budgets(config, shape, preset if is_preset else None)
    return RunSettings(options, training, config, (schedule_note, budget_note), run)


def _recomputes(options: TrainOptions, preset: Preset, config: Config) -> bool:
    """Whether the model itself recomputes; not where its units do, unless asked to."""
    if options.recompute is not None:
        return options.recompute
    return preset.recompute and config.activations.policy is ActivationPolicy.NONE


def _check_durability(options: TrainOptions) -> None:
    if options.durability not in (None, *Durability):
        allowed = ", ".join(repr(member.value) for member in Durability)
        raise ConfigError(f"--durability {options.durability}: unknown; allowed: {allowed}")
    if options.durability == "checkpoint" and options.save is None:
        raise ConfigError("--durability checkpoint needs a folder to save to; add --save DIR")
    if options.durability == "none" and options.save is not None:
        raise ConfigError("--durability none contradicts --save; leave one of them out")


def _check_directories(config: Config) -> None:
    if config.durability is Durability.STEP and config.nvme.paths is None:
        raise ConfigError("--durability step keeps the run in its swap folders; say where: add --nvme DIR")


def _check_ranks(options: TrainOptions) -> None:
    size = this_job().size
    one_rank_only = {
        "--baseline": options.baseline,
        "--scheduler-trace": options.scheduler_trace,
    }
    for name, given in one_rank_only.items():
        if size > 1 and given:
            raise ConfigError(f"{name} works with one rank, and this job has {size}; leave it out")


def _refuse_precision(precision: object) -> None:
    """Name what this loop trains in, not all that a config may ask for."""
    if precision == Precision.FP16:
        raise ConfigError(
            "precision = 'fp16' needs a loss scale, which the loop of `infinity train` does not have; allowed: "
            "'fp32', 'bf16'. In a loop of your own use infinity.GradScaler"
        )
    if precision not in list(Precision):
        raise ConfigError(f"precision = {precision!r}: allowed: 'fp32', 'bf16'")


def _config_file(path: Path, precision: str | None) -> Config:
    """The settings in a file; `precision` is what was typed, and replaces that of the file."""
    settings = read_settings(path)
    try:
        if precision is None and "precision" in settings:
            _refuse_precision(settings["precision"])
        return Config(**settings)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _engine_config(options: TrainOptions) -> Config:
    config = Config() if options.config is None else _config_file(options.config, options.precision)
    changes: dict[str, Any] = {}
    if not config.unit_classes and config.wrap_policy is None:
        changes["unit_classes"] = (Block.__name__,)  # a single one would be looked into: it repeats nothing
    if options.precision is not None:
        _refuse_precision(options.precision)
        changes["precision"] = options.precision
    if options.activations is not None:
        changes["activations"] = {"policy": options.activations}
    if options.state_format is not None:
        changes["state_format"] = options.state_format
    if options.schedule is not None:
        changes["schedule"] = options.schedule
    if options.durability is not None:
        changes["durability"] = options.durability
    if options.micro_batches is not None:
        changes["micro_batches"] = options.micro_batches
    sections: dict[str, dict[str, object]] = {
        "device": {"kind": options.device, "budget": options.device_budget},
        "host": {"budget": options.host_budget},
        "nvme": {"paths": options.nvme or None, "io_timeout_s": options.io_timeout, "io_log": options.io_log},
    }
    for name, section in sections.items():
        given = {key: value for key, value in section.items() if value is not None}
        if given:
            changes[name] = given
    return config.with_(**changes) if changes else config


def _choose_schedule(config: Config, options: TrainOptions) -> tuple[Config, str]:
    accumulates = (options.accumulate or 1) > 1
    needs_all = [name for name, used in (("--accumulate", accumulates), ("--clip", options.clip)) if used]
    if config.schedule is Schedule.OVERLAPPED and needs_all:
        raise ConfigError(
            f"schedule 'overlapped' contradicts {' and '.join(needs_all)}: it updates each unit as soon as its "
            "gradient is complete, before the others are known; allowed: 'deferred', 'synchronous', 'auto'"
        )
    if config.schedule is not Schedule.AUTO:
        return config, f"schedule: {config.schedule.value} (asked for)"
    if this_job().size > 1:
        reason = "auto: several ranks agree on their gradients before the first update"
        return config.with_(schedule=Schedule.SYNCHRONOUS), f"schedule: synchronous ({reason})"
    if needs_all:
        reason = f"{' and '.join(needs_all)} need all gradients before the first update"
        if config.durability is Durability.STEP:
            return config.with_(schedule=Schedule.SYNCHRONOUS), f"schedule: synchronous (auto: {reason})"
        return config, f"schedule: auto ({reason}: deferred where host memory holds them, else synchronous)"
    reason = "auto: neither accumulation nor clipping, so units are updated during backward"
    return config.with_(schedule=Schedule.OVERLAPPED), f"schedule: overlapped ({reason})"


def _choose_budgets(config: Config, shape: GptShape, preset: Preset | None) -> tuple[Config, str]:
    """Fill in the budgets that were not given: the preset's, or ones derived from the model's size."""
    if config.device.budget is not None and config.host.budget is not None:
        return config, "budgets: as given"
    if preset is not None:
        device: int | str = preset.device_budget
        host: int | str = preset.host_budget
        source = "the preset's"
    else:
        device, host = comfortable_budgets(minima_of(shape, config))
        source = "derived from the model's size, far below its state"
    job = this_job()
    if job.size > 1:  # averaging a gradient takes device memory; the host budget is shared out among the ranks
        device, host = 2 * parse_nbytes(device), job.local_size * parse_nbytes(host)
    changes: dict[str, Any] = {}
    if config.device.budget is None:
        changes["device"] = {"budget": device}
    if config.host.budget is None:
        changes["host"] = {"budget": host}
    return config.with_(**changes), f"budgets: {source}" + ("" if len(changes) == 2 else ", where none was given")
