"""DeepSpeed's JSON settings, translated: `infinity.Config.from_deepspeed` and `infinity migrate`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from infinity.config import Config, Precision
from infinity.errors import ConfigError
from infinity.migration.deepspeed_keys import FIXED
from infinity.migration.deepspeed_loop import scheduler_line
from infinity.migration.report import Finding, Migration, Outcome
from storage.paths import StrPath

_AUTO = "auto"
_AUTO_TEXT = "Hugging Face's Trainer fills it in from its arguments; use those, see docs/huggingface.md"
_ZERO = "zero_optimization"
_OFF = (Outcome.UNNEEDED, "off")
_FORMER = {"bfloat16": "bf16"}  # sections that had another name, which DeepSpeed still takes
_PRECISION_KEYS = ("fp16.enabled", "bf16.enabled")
_SCALE_KEYS = (
    *("fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.hysteresis"),
    *("fp16.consecutive_hysteresis", "fp16.min_loss_scale"),
)
_MOST_POWER = 126  # of two, that fp32 gradients can be multiplied by
_OFFLOADS = (f"{_ZERO}.offload_param", f"{_ZERO}.offload_optimizer")
_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "lion": "Lion", "sgd": "SGD"}
_KINDS = {"Adam": "adam", "AdamW": "adamw", "Lion": "lion", "SGD": "sgd"}
_OPTIMIZER_SETTINGS = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")
_COMPUTED = (
    *_PRECISION_KEYS,
    *_SCALE_KEYS,
    *(f"{key}.{name}" for key in _OFFLOADS for name in ("device", "nvme_path", "pin_memory")),
    *(f"{_ZERO}.{name}" for name in ("stage", "stage3_param_persistence_threshold", "zero_hpz_partition_size")),
    *(f"{_ZERO}.mics_shard_size", "gradient_accumulation_steps", "gradient_clipping", "aio.use_gds"),
    *("optimizer.type", "scheduler.type", "bf16.bf16_optimizer_states", "activation_checkpointing.cpu_checkpointing"),
)
_MOST_LEVELS = 20
# What has settings inside: DeepSpeed takes no other value there.
_SECTIONS = frozenset(
    name.rsplit(".", depth)[0]
    for name in (*FIXED, *_COMPUTED, "optimizer.params.lr", "scheduler.params.lr")
    for depth in range(1, name.count(".") + 1)
)


def read_deepspeed(source: StrPath | Mapping[str, Any]) -> Migration:
    """Translate a DeepSpeed configuration.

    Args:
        source: the JSON file, or its contents.

    Raises:
        ConfigError: the file cannot be read, or a value is of the wrong kind.
    """
    if not isinstance(source, Mapping | str | os.PathLike):
        raise ConfigError(f"DeepSpeed's settings are given as {source!r}; give the JSON file's path, or its contents")
    settings = dict(source) if isinstance(source, Mapping) else _read(Path(source))
    return _Translation(settings).run()


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: the file holds {type(settings).__name__}; DeepSpeed's settings are an object")
    return settings


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted name, in the order of the file."""
    if prefix.count(".") > _MOST_LEVELS:
        raise ConfigError(
            f"{prefix[:60]}...: settings inside settings more than {_MOST_LEVELS} deep, which DeepSpeed has nowhere"
        )
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class _Translation:
    """One pass over the settings. `run` may be called once."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        both = [(old, new) for old, new in _FORMER.items() if old in settings and new in settings]
        if both:
            raise ConfigError("{} and {} are both given; they are two names of one section".format(*both[0]))
        self._names = {_present_name(name): name for name, _ in _flat(settings)}  # as the file has them
        self._values = {_present_name(name): value for name, value in _flat(settings)}
        self._findings: dict[str, Finding] = {}
        self._config: dict[str, Any] = {}
        self._optimizer_arguments: dict[str, Any] = {}
        self._loop: list[str] = []

    def run(self) -> Migration:
        self._precision()
        self._activations()
        self._tiers()
        self._sharding()
        self._training()
        optimizer = self._optimizer()
        scheduler = scheduler_line(self._values)
        self._fixed()
        loop = ["engine = infinity.offload(model, config)", optimizer, *self._loop]
        if "scheduler.type" in self._values:
            self._note("scheduler.type", *scheduler)
            if scheduler[0] is Outcome.LOOP:
                loop.append(scheduler[1])
        findings = tuple(self._findings[key] for key in self._values if key in self._findings)
        return Migration(Config(**self._config), findings, tuple(loop))

    def _note(self, key: str, outcome: Outcome, text: str) -> None:
        if key in self._values:
            self._findings[key] = Finding(self._names[key], self._values[key], outcome, text)

    # Parts -----------------------------------------------------------------------------------------------------

    def _precision(self) -> None:
        on = {key: self._flag(key) for key in _PRECISION_KEYS}
        if on["fp16.enabled"] and on["bf16.enabled"]:
            raise ConfigError("fp16.enabled and bf16.enabled are both true; DeepSpeed refuses that too. Turn one off")
        precision = Precision.FP32
        for key, chosen in (("fp16.enabled", Precision.FP16), ("bf16.enabled", Precision.BF16)):
            if on[key] or (self._values.get(key) == _AUTO and not any(on.values())):
                precision = chosen  # of two that the Trainer may choose, bf16
        self._config["precision"] = precision.value
        for key, kind in zip(_PRECISION_KEYS, ("fp16", "bf16"), strict=True):
            if self._values.get(key) == _AUTO and not any(on.values()):
                self._note(key, Outcome.MAPPED, f"precision={precision.value!r} is assumed; {_AUTO_TEXT}")
            else:
                self._note(key, Outcome.MAPPED, f"precision={precision.value!r}" if on[key] else f"{kind} is off")
        key = "bf16.bf16_optimizer_states"
        if precision is Precision.BF16 and self._flag(key):
            self._config["state_format"] = "bf16"
            self._note(key, Outcome.MAPPED, "state_format='bf16': rounded at random, the same in every run")
        else:
            self._note(key, Outcome.BETTER, "moments in fp32, as those of torch.optim; state_format='bf16' halves them")
        if precision is Precision.FP16:
            self._loss_scale()
        for key in _SCALE_KEYS:
            if key not in self._findings:
                self._note(key, Outcome.UNNEEDED, f"losses are not scaled in {precision.value}")

    def _loss_scale(self) -> None:
        fixed, power = self._number("fp16.loss_scale", 0), self._number("fp16.initial_scale_power", 16)
        if fixed:
            power = math.log2(fixed) if fixed > 0 else math.nan
        if power not in range(-_MOST_POWER, _MOST_POWER + 1):
            given = f"loss_scale = {fixed:g}" if fixed else f"initial_scale_power = {power:g}"
            raise ConfigError(
                f"fp16.{given}: only powers of two scale without rounding, of 2**-{_MOST_POWER} to 2**{_MOST_POWER}; "
                "use the nearest"
            )
        arguments = {"init_scale": 2.0**power}
        if not fixed and "fp16.loss_scale_window" in self._values:
            arguments["growth_interval"] = int(self._number("fp16.loss_scale_window", 1000))
        shown = ", ".join(f"{name}={value:g}" for name, value in arguments.items())
        self._loop.append(f"scaler = infinity.GradScaler({shown})  # scale(loss).backward(); step(optimizer); update()")
        what = "a fixed scale: leave update() out" if fixed else "a dynamic scale: infinity.GradScaler"
        self._note("fp16.loss_scale", Outcome.LOOP, what)
        self._note("fp16.initial_scale_power", Outcome.LOOP, "GradScaler(init_scale=...)")
        self._note("fp16.loss_scale_window", Outcome.LOOP, "GradScaler(growth_interval=...)")
        self._note("fp16.hysteresis", Outcome.UNSUPPORTED, "the scale falls at the first overflow, as in torch.amp")
        self._note("fp16.consecutive_hysteresis", Outcome.UNSUPPORTED, "there is no hysteresis, as in torch.amp")
        self._note("fp16.min_loss_scale", Outcome.UNSUPPORTED, "the scale has no floor, as in torch.amp")

    def _activations(self) -> None:
        key = "activation_checkpointing.cpu_checkpointing"
        if self._flag(key):
            self._config["activations"] = "host"
            self._note(key, Outcome.MAPPED, "activations='host': what units save for backward waits in host memory")
        else:
            self._note(key, Outcome.UNNEEDED, "off")

    def _tiers(self) -> None:
        paths: list[str] = []
        for key in _OFFLOADS:
            device = self._values.get(f"{key}.device", "none")
            if device not in ("none", "cpu", "nvme", None):
                raise ConfigError(f"{key}.device = {device!r}: DeepSpeed allows 'none', 'cpu', 'nvme'")
            self._note(f"{key}.device", Outcome.BETTER, _where(str(device)))
            path = self._values.get(f"{key}.nvme_path")
            if isinstance(path, str) and device == "nvme" and path not in paths:
                paths.append(path)
            used = "a folder for each drive: give several to use them together" if device == "nvme" else "not used"
            self._note(
                f"{key}.nvme_path", Outcome.MAPPED if device == "nvme" else Outcome.UNNEEDED, f"nvme.paths; {used}"
            )
            self._pinning(f"{key}.pin_memory")
        if paths:
            self._config["nvme"] = {"paths": paths}

    def _pinning(self, key: str) -> None:
        if key not in self._values:
            return
        if self._flag(key):
            self._note(key, Outcome.BETTER, "host.pin: memory is pinned where a CUDA device gains by it")
        else:
            self._config["host"] = {"pin": False}
            self._note(key, Outcome.MAPPED, "host.pin=False")

    def _sharding(self) -> None:
        stage = self._number(f"{_ZERO}.stage", 0)
        if stage not in (0, 1, 2, 3):
            raise ConfigError(f"{_ZERO}.stage = {stage:g}: DeepSpeed allows 0, 1, 2, 3")
        self._config["stage"] = int(stage) or 1
        text = f"stage={int(stage)}" if stage else "stage=1: the same numbers as plain data parallelism, in less memory"
        self._note(f"{_ZERO}.stage", Outcome.MAPPED, text)
        key = f"{_ZERO}.stage3_param_persistence_threshold"
        if self._values.get(key) not in (None, _AUTO):
            numel = int(self._number(key, 0))
            nbytes = numel * (4 if self._config["precision"] == "fp32" else 2)
            self._config["resident_threshold"] = nbytes
            self._note(key, Outcome.MAPPED, f"resident_threshold={nbytes} bytes; outside repeated blocks")
        else:
            self._note(key, Outcome.BETTER, "resident_threshold, in bytes; outside repeated blocks")
        for name in ("zero_hpz_partition_size", "mics_shard_size"):
            size = int(self._number(f"{_ZERO}.{name}", 1))
            if size > 1:
                shape = f"(world_size // {size}, {size})"
                self._loop.append(f'mesh = init_device_mesh("cuda", {shape})  # infinity.offload(..., mesh=mesh)')
                self._note(
                    f"{_ZERO}.{name}", Outcome.LOOP, f"hybrid sharding: shard over {size}, replicate over the rest"
                )
            else:
                self._note(f"{_ZERO}.{name}", Outcome.UNNEEDED, "off")

    def _training(self) -> None:
        clip = self._values.get("gradient_clipping")
        if clip not in (None, _AUTO):
            norm = self._number("gradient_clipping", 0)
            if norm:
                self._optimizer_arguments["max_grad_norm"] = norm
            self._note("gradient_clipping", Outcome.LOOP, f"max_grad_norm={norm:g} of the optimizer" if norm else "off")
        batches = self._values.get("gradient_accumulation_steps")
        if batches not in (None, _AUTO):
            count = int(self._number("gradient_accumulation_steps", 1))
            text = (
                f"divide the loss by {count}, call step() after every {count}th backward" if count > 1 else "one batch"
            )
            self._note("gradient_accumulation_steps", Outcome.LOOP, text)
            if count > 1:
                self._loop.append(f"(loss / {count}).backward()  # and optimizer.step() after every {count}th")
        gds = self._values.get("aio.use_gds")
        wants = bool(gds) and gds != _AUTO
        text = (
            "nvme.engine='gds' is refused with its reason: torch's bindings move device memory only" if wants else "off"
        )
        self._note("aio.use_gds", Outcome.UNSUPPORTED if wants else Outcome.UNNEEDED, text)

    def _optimizer(self) -> str:
        given = self._values.get("optimizer.type", "AdamW")
        name = _OPTIMIZERS.get(str(given).lower())
        settings = {name: self._values.get(f"optimizer.params.{name}") for name in _OPTIMIZER_SETTINGS}
        if name == "Adam" and self._values.get("optimizer.params.adam_w_mode", True) is not False:
            name = "AdamW"  # as DeepSpeed does
        if name is None:
            why = "refused by name; infinity.AdamW, Adam, Lion and SGD keep their state in the tiers"
            self._note("optimizer.type", Outcome.UNSUPPORTED, why)
            name = "AdamW"
        else:
            self._note("optimizer.type", Outcome.MAPPED, f"infinity.{name}; optimizer={_KINDS[name]!r}")
        arguments = {key: value for key, value in settings.items() if value not in (None, _AUTO)}
        if name == "SGD" and self._number("optimizer.params.momentum", 0):
            self._config["optimizer"] = "sgd_momentum"
        elif name != "AdamW":
            self._config["optimizer"] = _KINDS[name]
        if isinstance(arguments.get("betas"), list):
            arguments["betas"] = tuple(arguments["betas"])
        for key in [key for key in self._values if key.startswith("optimizer.params.")]:
            setting = key.removeprefix("optimizer.params.")
            if self._values[key] == _AUTO:
                self._note(key, Outcome.LOOP, _AUTO_TEXT)
            elif setting in arguments:
                self._note(key, Outcome.LOOP, f"{setting} of infinity.{name}")
            else:
                self._note(key, Outcome.UNNEEDED, f"infinity.{name} has one implementation")
        shown = ", ".join(f"{key}={value!r}" for key, value in (arguments | self._optimizer_arguments).items())
        return f"optimizer = infinity.{name}(model.parameters(){', ' + shown if shown else ''})"

    def _fixed(self) -> None:
        """Everything whose outcome does not depend on its value; and what nobody knows."""
        for key in self._values:
            if key in self._findings or key == "scheduler.type" or key.startswith("scheduler.params."):
                continue
            # The documentation of transformers puts `aio` inside `zero_optimization`, where it has no effect.
            name = key.removeprefix(f"{_ZERO}.") if key.startswith(f"{_ZERO}.aio.") else key
            outcome = FIXED.get(name) or _below(name)
            if outcome is not None and outcome[0] in (Outcome.UNSUPPORTED, Outcome.LOOP) and self._is_off(key):
                outcome = _OFF
            if self._values[key] == _AUTO and (outcome is None or outcome[0] is Outcome.LOOP):
                self._note(key, Outcome.LOOP, _AUTO_TEXT)
            elif outcome is not None:
                self._note(key, *outcome)
            elif name in _SECTIONS:
                self._empty_section(key)
            else:
                self._note(key, Outcome.UNKNOWN, _guess(name))
        for key in [key for key in self._values if key.startswith("scheduler.params.")]:
            self._note(key, Outcome.LOOP, _AUTO_TEXT if self._values[key] == _AUTO else "see scheduler.type")

    def _empty_section(self, key: str) -> None:
        value = self._values[key]
        if value not in (None, False, {}):
            raise ConfigError(f"{key} = {value!r}: DeepSpeed wants settings by name there")
        self._note(key, *_OFF)

    # Values ----------------------------------------------------------------------------------------------------

    def _is_off(self, key: str) -> bool:
        """Whether a setting, or the section that it lies in, is turned off."""
        sections = [key.rsplit(".", depth)[0] for depth in range(1, key.count(".") + 1)]
        return self._values[key] in (False, None) or any(
            self._values.get(f"{section}.enabled") is False for section in sections
        )

    def _flag(self, key: str) -> bool:
        value = self._values.get(key, False)
        if isinstance(value, bool):
            return value
        if value in (None, _AUTO):
            return False
        raise ConfigError(f"{key} = {value!r}: DeepSpeed allows true, false")

    def _number(self, key: str, default: float) -> float:
        value = self._values.get(key)
        if value in (None, _AUTO):
            return default
        try:
            number = math.nan if isinstance(value, bool) else float(str(value))
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f"{key} = {value!r}: DeepSpeed wants a number there")
        return number


def _present_name(name: str) -> str:
    section, dot, rest = name.partition(".")
    return _FORMER.get(section, section) + dot + rest


def _where(device: str) -> str:
    if device == "nvme":
        return "what fits in device.budget and host.budget stays there, the rest goes to nvme.paths"
    if device == "cpu":
        return "what fits in device.budget stays there, the rest goes to host memory, up to host.budget"
    return "stays on the device as far as device.budget allows"


def _below(name: str) -> tuple[Outcome, str] | None:
    """The rule for a whole section that a setting lies in."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (rule := FIXED.get(".".join(parts[:length]) + ".*")) is not None:
            return rule
    return None


def _guess(name: str) -> str:
    near = get_close_matches(name, [*FIXED, *_COMPUTED], n=1, cutoff=0.7)
    return "DeepSpeed has no such setting" + (f"; did you mean {near[0]!r}?" if near else "")
