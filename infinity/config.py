"""Settings of a run: strict, frozen models that refuse what they do not know.

Every mistake becomes one `ConfigError` that lists all fields at fault, their values and what is allowed.
A budget of `None` means "what is available"; the engine derives it when it looks at the machine.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, ValidationError, model_validator

from infinity import config_values as values
from infinity.choices import (
    ActivationPolicy,
    Calibrate,
    DeviceKind,
    Durability,
    IoChecksum,
    IoEngine,
    OptimizerKind,
    Precision,
    Schedule,
    StateFormat,
    WearAction,
)
from infinity.config_errors import explain
from infinity.config_values import Count, Seconds
from infinity.errors import ConfigError
from infinity.sizes import MIB, Nbytes, NbytesOrZero, format_nbytes, parse_nbytes
from storage.paths import StrPath

if TYPE_CHECKING:
    from infinity.migration.report import Migration

__all__ = [
    "ActivationConfig",
    "ActivationPolicy",
    "Calibrate",
    "Config",
    "Count",
    "DeviceConfig",
    "DeviceKind",
    "Durability",
    "HostConfig",
    "IoChecksum",
    "IoEngine",
    "NvmeConfig",
    "OptimizerKind",
    "Precision",
    "Schedule",
    "Seconds",
    "StateFormat",
    "WearAction",
    "WearBudget",
    "read_settings",
    "refuse_state_format",
]
_SIZES = {"budget", "host_budget", "nvme_budget", "chunk", "resident_threshold", "block_nbytes"}
_SIZES |= {"h2d_bytes_per_s", "d2h_bytes_per_s"}
_PAGE_NBYTES = 4096  # swap files are read and written in pages; `storage` is not imported for one number


class _Section(BaseModel):
    """Common behaviour: frozen, nothing unknown, nothing coerced, errors as `ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(explain(type(self), error)) from None

    # Marks __init__ as one that pydantic may bypass for nested sections: errors then keep their full path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: object) -> None:
        raise ConfigError(f"{name} = {value!r}: settings are frozen; make a copy with .with_({name}=...)")

    def with_(self, **changes: Any) -> Self:
        """A copy with `changes`, validated as a whole; a mapping for a nested section changes only the fields in it.

        Raises ConfigError like the constructor.
        """
        given = {name: getattr(self, name) for name in self.model_fields_set}
        for name, change in changes.items():
            present = getattr(self, name, None)
            if isinstance(present, _Section) and isinstance(change, Mapping):
                nested = {inner: getattr(present, inner) for inner in present.model_fields_set}
                given[name] = nested | dict(change)
            else:
                given[name] = change
        return type(self)(**given)


class WearBudget(_Section):
    """Bytes that may be written to one drive."""

    nbytes: Nbytes
    is_per_day: StrictBool = False


def _wear_budget(value: object) -> object:
    """Bytes in all, or text such as "100TB" or "2TB/day"."""
    if value is None or isinstance(value, WearBudget):
        return value
    if isinstance(value, Mapping):
        return WearBudget(**value)
    text, _, span = value.partition("/") if isinstance(value, str) else (value, "", "")
    if span not in ("", "day"):
        raise ValueError('allowed: bytes in all such as "100TB", or per day such as "2TB/day"')
    nbytes = parse_nbytes(text)
    if not nbytes:
        raise ValueError("it must be greater than 0")
    return WearBudget(nbytes=nbytes, is_per_day=span == "day")


class DeviceConfig(_Section):
    """The compute device. `path`, the bandwidths (bytes per second) and `latency_s` belong to `kind="fake"` only."""

    kind: Annotated[DeviceKind, BeforeValidator(values.choice(DeviceKind))] = DeviceKind.AUTO
    budget: Nbytes | None = None
    path: Annotated[Path | None, BeforeValidator(values.path)] = None
    h2d_bytes_per_s: Nbytes | None = None
    d2h_bytes_per_s: Nbytes | None = None
    latency_s: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = None

    if TYPE_CHECKING:  # any text or number a validator takes may be passed, not only the field's own type

        def __init__(self, **data: Any) -> None: ...

    @model_validator(mode="after")
    def _only_the_fake_is_modelled(self) -> Self:
        modelled = ("path", "h2d_bytes_per_s", "d2h_bytes_per_s", "latency_s")
        given = [name for name in modelled if getattr(self, name) is not None]
        if given and self.kind is not DeviceKind.FAKE:
            kind = self.kind.value
            raise ValueError(f"{', '.join(given)} would have no effect with kind={kind!r}; allowed: kind='fake'")
        return self


class HostConfig(_Section):
    """Host memory for shards in transit or resident there; `pin=None` pins where a CUDA device gains by it."""

    budget: Nbytes | None = None
    pin: StrictBool | None = None

    if TYPE_CHECKING:

        def __init__(self, **data: Any) -> None: ...


class NvmeConfig(_Section):
    """Swap files: one directory per drive (`None`: a temporary one), and how they are read and written.

    `engine` is an `IoEngine` or the name of a backend that another distribution brings (`storage.backends.custom`).
    `threads` (blocks at a drive at a time) and `block_nbytes` are chosen when `None`, see `Calibrate`. `eio_retries` is
    how often a block is tried again after EIO, and `retry_full_s` how long a drive that had no room is left alone
    before a write tries it again. `wear_budget` is what all runs may write to each drive, "100TB" or "2TB/day", and
    `wear_action` what `infinity train` and `infinity.wear.WearWatch` do beyond it. `io_log` is a file for every
    transfer of the run in fio's trace format.
    """

    paths: Annotated[tuple[Path, ...] | None, BeforeValidator(values.paths)] = None
    budget: Nbytes | None = None
    engine: Annotated[IoEngine | str, BeforeValidator(values.engine)] = IoEngine.AUTO
    threads: Count | None = None
    block_nbytes: Nbytes | None = None
    calibrate: Annotated[Calibrate, BeforeValidator(values.choice(Calibrate))] = Calibrate.CACHED
    checksum: Annotated[IoChecksum, BeforeValidator(values.choice(IoChecksum))] = IoChecksum.XXH3
    eio_retries: Annotated[int, Field(strict=True, ge=0)] = 2
    retry_full_s: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 30.0
    io_timeout_s: Seconds = 60.0
    wear_budget: Annotated[WearBudget | None, BeforeValidator(_wear_budget)] = None
    wear_action: Annotated[WearAction, BeforeValidator(values.choice(WearAction))] = WearAction.WARN
    io_log: Annotated[Path | None, BeforeValidator(values.path)] = None

    if TYPE_CHECKING:

        def __init__(self, **data: Any) -> None: ...

    @model_validator(mode="after")
    def _slow_needs_a_day(self) -> Self:
        if self.wear_action is WearAction.SLOW and not (self.wear_budget and self.wear_budget.is_per_day):
            raise ValueError("wear_action = 'slow' keeps to a budget per day; give wear_budget as in \"2TB/day\"")
        return self

    @model_validator(mode="after")
    def _whole_pages(self) -> Self:
        if self.block_nbytes is not None and self.block_nbytes % _PAGE_NBYTES:
            raise ValueError(f"block_nbytes = {self.block_nbytes}: allowed: multiples of {_PAGE_NBYTES}")
        return self


class ActivationConfig(_Section):
    """Checkpoints of activations at the boundaries of units; see `ActivationPolicy`.

    `host_budget` is a part of the host budget, used by "host" and "nvme"; `nvme_budget` is swap space, used by "nvme".
    """

    policy: Annotated[ActivationPolicy, BeforeValidator(values.choice(ActivationPolicy))] = ActivationPolicy.NONE
    host_budget: Nbytes = 64 * MIB
    nvme_budget: Nbytes = 1024 * MIB

    if TYPE_CHECKING:

        def __init__(self, **data: Any) -> None: ...

    @property
    def held_nbytes(self) -> int:
        """Host memory for saved inputs."""
        return self.host_budget if self.policy in (ActivationPolicy.HOST, ActivationPolicy.NVME) else 0

    @property
    def stored_nbytes(self) -> int:
        """Swap space for saved inputs."""
        return self.nvme_budget if self.policy is ActivationPolicy.NVME else 0


class Config(_Section):
    """All settings of a run. Sections take an instance or a mapping; sizes take bytes or text such as "20GiB".

    `optimizer` is the one whose state is planned for; an optimizer with less state may be built over it as well.
    `state_format` is how its moments are stored, smaller than fp32 for AdamW in bf16 and fp16 only.
    `activations` is what units save for their backward, a section or the name of its policy.
    `micro_batches` is into how many slices every unit cuts the batch while it is gathered.
    `durability="step"` needs `nvme.paths`: the state stays there, with every finished step committed.
    `chunk` is the optimizer state of one chunk in bytes (`None`: chosen from the host budget). Parameters outside
    repeated blocks and smaller than `resident_threshold` stay on the device. A rank waits for others at most
    `rank_timeout_s`. `unit_classes` names the modules whose parameters are gathered together (empty: the outermost
    repeated blocks are found automatically); `wrap_policy` chooses them instead, a function that is given the model,
    or the name of one that another distribution brings.
    Raises ConfigError for anything unknown, of the wrong kind or contradictory.
    """

    precision: Annotated[Precision, BeforeValidator(values.choice(Precision))] = Precision.BF16
    device: DeviceConfig = Field(default_factory=DeviceConfig)
    host: HostConfig = Field(default_factory=HostConfig)
    nvme: NvmeConfig = Field(default_factory=NvmeConfig)
    stage: Annotated[Literal[1, 2, 3], BeforeValidator(values.stage)] = 3
    schedule: Annotated[Schedule, BeforeValidator(values.choice(Schedule))] = Schedule.AUTO
    optimizer: Annotated[OptimizerKind, BeforeValidator(values.choice(OptimizerKind))] = OptimizerKind.ADAMW
    state_format: Annotated[StateFormat, BeforeValidator(values.choice(StateFormat))] = StateFormat.FP32
    micro_batches: Count = 1
    activations: Annotated[ActivationConfig, BeforeValidator(values.policy_alone)] = Field(
        default_factory=ActivationConfig
    )
    durability: Annotated[Durability, BeforeValidator(values.choice(Durability))] = Durability.NONE
    chunk: Nbytes | None = None
    resident_threshold: NbytesOrZero = MIB
    rank_timeout_s: Seconds = 600.0
    unit_classes: Annotated[tuple[str | type, ...], BeforeValidator(values.unit_classes)] = ()
    wrap_policy: Annotated[str | Callable[..., Any] | None, BeforeValidator(values.wrap_policy)] = None
    optimizer_threads: Count | None = None

    if TYPE_CHECKING:

        def __init__(self, **data: Any) -> None: ...

    @model_validator(mode="after")
    def _slices_are_not_run_again(self) -> Self:
        if self.micro_batches > 1 and self.activations.policy is not ActivationPolicy.NONE:
            raise ValueError(
                f"activations.policy = {self.activations.policy.value!r} contradicts micro_batches = "
                f"{self.micro_batches}: a unit cannot run its slices again; allowed: 'none', or micro_batches = 1"
            )
        return self

    @model_validator(mode="after")
    def _units_are_chosen_once(self) -> Self:
        if self.unit_classes and self.wrap_policy is not None:
            raise ValueError("unit_classes and wrap_policy both choose the units; allowed: one of them")
        return self

    @model_validator(mode="after")
    def _state_format_has_a_kernel(self) -> Self:
        refuse_state_format(self.state_format, self.precision, self.optimizer)
        return self

    @classmethod
    def load(cls, path: StrPath) -> Self:
        """The settings in a `.toml` or `.json` file; ConfigError names the file and the key."""
        path = Path(path)
        settings = read_settings(path)
        try:
            return cls(**settings)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_deepspeed(
        cls, source: StrPath | Mapping[str, Any], *, on_report: "Callable[[Migration], object]" = print
    ) -> Self:
        """The settings of a DeepSpeed configuration; what became of each of them is printed.

        Args:
            source: DeepSpeed's JSON file, or its contents.
            on_report: gets the whole report instead of `print`; what the loop has to do (accumulate, clip, scale
                losses) is in `report.loop`.

        Raises:
            ConfigError: the file cannot be read, or a value is of the wrong kind.
        """
        from infinity.migration.deepspeed import read_deepspeed

        migration = read_deepspeed(source)
        on_report(migration)
        return cls(**{name: getattr(migration.config, name) for name in migration.config.model_fields_set})

    def describe(self) -> str:
        """One line per setting, `name = value`, sizes readable, what was not given marked as the default."""
        return "\n".join(_lines(self, prefix=""))


def refuse_state_format(state_format: StateFormat, precision: Precision, optimizer: OptimizerKind) -> None:
    """Raise ConfigError where the moments of an optimizer cannot be stored in a format."""
    has_kernel = precision in (Precision.BF16, Precision.FP16) and optimizer is OptimizerKind.ADAMW
    if state_format is not StateFormat.FP32 and not has_kernel:
        raise ConfigError(
            f"state_format = {state_format.value!r} with precision {precision.value!r} and optimizer "
            f"{optimizer.value!r}: only AdamW in bf16 or fp16 stores its moments in less; allowed: "
            "state_format = 'fp32', or precision = 'bf16' or 'fp16' and optimizer = 'adamw'"
        )


def read_settings(path: Path) -> dict[str, Any]:
    """What a `.toml` or `.json` file says, before it is checked; ConfigError where it cannot be read."""
    readers = {".toml": tomllib.loads, ".json": json.loads}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: cannot tell what kind of file this is; allowed: .toml, .json")
    try:
        settings = reader(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # of both decoders, with line and column, and of the text encoding
        raise ConfigError(f"{path}: not valid {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: the file holds {type(settings).__name__}; allowed: an object of settings")
    return settings


def _lines(section: _Section, prefix: str) -> list[str]:
    lines = []
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, _Section):
            lines += _lines(value, f"{prefix}{name}.")
            continue
        note = "" if name in section.model_fields_set else "  (default)"
        lines.append(f"{prefix}{name} = {_shown(name, value)}{note}")
    return lines


def _shown(name: str, value: object) -> str:
    if isinstance(value, int) and name in _SIZES:
        return format_nbytes(value) + ("/s" if name.endswith("_per_s") else "")
    if isinstance(value, tuple):
        return ", ".join(item.__qualname__ if isinstance(item, type) else str(item) for item in value) or "none"
    if callable(value):
        return getattr(value, "__qualname__", repr(value))
    return "unset" if value is None else str(value)
