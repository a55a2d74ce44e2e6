"""What `infinity train` was asked to do, resolved: preset, options, settings file and derived budgets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from infinity.cli.sizing import comfortable_budgets, minima_of
from infinity.config import Config, DeviceKind, Precision, Schedule
from infinity.errors import ConfigError
from infinity.models.gpt import GptShape
from infinity.models.presets import PRESETS, Preset


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """The options as given on the command line; None where nothing was given."""

    preset: str
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    seq: int | None = None
    batch: int | None = None
    accumulate: int = 1
    steps: int | None = None
    seed: int = 0
    lr: float | None = None
    clip: float | None = None
    recompute: bool | None = None
    data: tuple[Path, ...] = ()
    config: Path | None = None
    precision: str | None = None
    device: str | None = None
    device_budget: str | None = None
    host_budget: str | None = None
    nvme: tuple[Path, ...] = ()
    schedule: str | None = None
    io_timeout: float | None = None
    io_log: Path | None = None
    durability: str | None = None
    save: Path | None = None
    resume: Path | None = None
    trace: Path | None = None
    metrics: Path | None = None
    json: Path | None = None
    baseline: bool = False


@dataclass(frozen=True, slots=True)
class Training:
    """What a training loop needs to know, offloaded or plain; travels to the baseline's process as JSON."""

    shape: GptShape
    batch: int
    accumulate: int
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
        return self.batch * self.accumulate * self.shape.seq


@dataclass(frozen=True, slots=True)
class RunSettings:
    """A run, ready to start. `notes` are decisions made for the user, in words."""

    options: TrainOptions
    training: Training
    config: Config
    notes: tuple[str, ...] = field(default=())


def resolve(options: TrainOptions) -> RunSettings:
    """Put a run's settings together: options first, then the settings file, then the preset.

    Raises:
        ConfigError: a value is not allowed, or two of them contradict each other.
    """
    preset = _preset_of(options)
    shape = _shape_of(options, preset)
    _check_durability(options)
    if options.clip is not None and not options.clip > 0:
        raise ConfigError(f"--clip {options.clip}: it must be greater than 0; leave it out not to clip")
    config = _engine_config(options)
    config, schedule_note = _choose_schedule(config, options)
    kind = config.device.kind
    if kind is DeviceKind.AUTO:
        kind = DeviceKind.CUDA if torch.cuda.is_available() else DeviceKind.CPU
    training = Training(
        shape=shape,
        batch=options.batch or preset.batch,
        accumulate=options.accumulate,
        steps=options.steps or preset.steps,
        seed=options.seed,
        lr=options.lr if options.lr is not None else preset.lr,
        clip=options.clip,
        recompute=preset.recompute if options.recompute is None else options.recompute,
        data=tuple(map(str, options.data)),
        device=kind.value,
    )
    is_preset = (shape.layers, shape.hidden, shape.seq) == (preset.layers, preset.hidden, preset.seq)
    config, budget_note = _choose_budgets(config, shape, preset if is_preset else None)
    return RunSettings(options, training, config, (schedule_note, budget_note))


def _preset_of(options: TrainOptions) -> Preset:
    if options.preset not in PRESETS:
        raise ConfigError(f"--preset {options.preset}: unknown; allowed: {', '.join(PRESETS)}")
    return PRESETS[options.preset]


def _shape_of(options: TrainOptions, preset: Preset) -> GptShape:
    hidden = options.hidden or preset.hidden
    heads = options.heads or (preset.heads if hidden % preset.heads == 0 else _default_heads(hidden))
    if hidden % heads:
        raise ConfigError(f"--hidden {hidden} --heads {heads}: hidden must be a multiple of heads")
    return GptShape(options.layers or preset.layers, hidden, heads, options.seq or preset.seq)


def _default_heads(hidden: int) -> int:
    """Heads of about 64 channels, in a number that divides `hidden`."""
    return next(heads for heads in range(max(hidden // 64, 1), 0, -1) if hidden % heads == 0)


def _check_durability(options: TrainOptions) -> None:
    if options.durability == "step":
        raise ConfigError(
            "--durability step: not available in this version; allowed: 'none', 'checkpoint' (with --save DIR)"
        )
    if options.durability not in (None, "none", "checkpoint"):
        raise ConfigError(f"--durability {options.durability}: unknown; allowed: 'none', 'checkpoint'")
    if options.durability == "checkpoint" and options.save is None:
        raise ConfigError("--durability checkpoint needs a folder to save to; add --save DIR")
    if options.durability == "none" and options.save is not None:
        raise ConfigError("--durability none contradicts --save; leave one of them out")


def _engine_config(options: TrainOptions) -> Config:
    config = Config.load(options.config) if options.config is not None else Config()
    changes: dict[str, Any] = {}
    if options.precision is not None:
        changes["precision"] = options.precision
    if options.schedule is not None:
        changes["schedule"] = options.schedule
    sections: dict[str, dict[str, object]] = {
        "device": {"kind": options.device, "budget": options.device_budget},
        "host": {"budget": options.host_budget},
        "nvme": {"paths": options.nvme or None, "io_timeout_s": options.io_timeout, "io_log": options.io_log},
    }
    for name, section in sections.items():
        given = {key: value for key, value in section.items() if value is not None}
        if given:
            changes[name] = given
    config = config.with_(**changes) if changes else config
    if config.precision is Precision.FP16:
        raise ConfigError(
            "precision 'fp16' needs a loss scale, which the loop of `infinity train` does not have; allowed: 'bf16', "
            "'fp32'. In a loop of your own use infinity.GradScaler"
        )
    return config


def _choose_schedule(config: Config, options: TrainOptions) -> tuple[Config, str]:
    needs_all = [name for name, used in (("--accumulate", options.accumulate > 1), ("--clip", options.clip)) if used]
    if config.schedule is Schedule.OVERLAPPED and needs_all:
        raise ConfigError(
            f"schedule 'overlapped' contradicts {' and '.join(needs_all)}: it updates each unit as soon as its "
            "gradient is complete, before the others are known; allowed: 'deferred', 'synchronous', 'auto'"
        )
    if config.schedule is not Schedule.AUTO:
        return config, f"schedule: {config.schedule.value} (asked for)"
    if needs_all:
        reason = f"{' and '.join(needs_all)} need all gradients before the first update"
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
    changes: dict[str, Any] = {}
    if config.device.budget is None:
        changes["device"] = {"budget": device}
    if config.host.budget is None:
        changes["host"] = {"budget": host}
    return config.with_(**changes), f"budgets: {source}" + ("" if len(changes) == 2 else ", where none was given")


def with_steps(training: Training, steps: int) -> Training:
    """The same training with another number of steps."""
    return replace(training, steps=steps)
