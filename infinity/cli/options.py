"""Options of commands, declared once: a command's options are the fields of a dataclass, each with its help.

Imports only what parsing needs. What several commands ask for has one declaration here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from infinity.cli.failures import reported
from infinity.models.presets import describe_presets

EPILOG = (
    "Exit codes: 0 success, 2 bad usage or impossible plan, 130 stopped by Ctrl-C, 143 by SIGTERM, 1 any other failure."
)

MODEL, TRAINING, MEMORY, OUTPUT = "Model", "Training", "Memory and disks", "Output"

_Options = TypeVar("_Options")
_Command = Callable[..., None]

PRESET_HELP = f"Size of the model: {describe_presets()}."


def option(text: str, panel: str, *names: str, **settings: Any) -> Any:
    """An option with its help text and where it stands in the help of the command."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


Preset = Annotated[str | None, option(PRESET_HELP, MODEL)]
Layers = Annotated[int | None, option("Number of blocks, such as 24.", MODEL, min=1)]
Hidden = Annotated[int | None, option("Channels, such as 1024.", MODEL, min=1)]
Heads = Annotated[int | None, option("Attention heads; must divide --hidden.", MODEL, min=1)]
Seq = Annotated[int | None, option("Tokens of a sample (bytes, in train).", MODEL, min=1)]
_RECOMPUTE = "Recompute activations in backward. Default: yes; in train and bench step as the preset has it."
Recompute = Annotated[bool | None, option(_RECOMPUTE, MODEL, "--recompute/--no-recompute", show_default=False)]
Batch = Annotated[int | None, option("Samples of a batch, on each rank.", TRAINING, min=1)]
Accumulate = Annotated[int | None, option("Batches of a step.", TRAINING, min=1, show_default="1")]
_MICRO_BATCHES = (
    "Slices in which every unit runs the batch while it is gathered once: --batch 8 --micro-batches 4 trains as "
    "--batch 2 --accumulate 4 would, and reads a quarter of its parameters."
)
MicroBatches = Annotated[int | None, option(_MICRO_BATCHES, TRAINING, min=1, show_default="1")]
Clip = Annotated[float | None, option("Largest gradient norm, such as 1.0.", TRAINING)]
Precision = Annotated[str | None, option("fp32 or bf16.", TRAINING, show_default="bf16")]
_ACTIVATIONS = "What units save for backward: none (all), or inputs only: recompute (on the device), host or nvme."
Activations = Annotated[str | None, option(_ACTIVATIONS, TRAINING, show_default="none")]
_STATE_FORMAT = "How AdamW's moments are stored in bf16: fp32, or rounded to bf16 or int8: fewer bytes, other bits."
StateFormat = Annotated[str | None, option(_STATE_FORMAT, TRAINING, show_default="fp32")]
_SCHEDULE = "When units are updated: auto, overlapped, deferred or synchronous."
Schedule = Annotated[str | None, option(_SCHEDULE, TRAINING, show_default="auto")]
Device = Annotated[str | None, option("auto, cpu, cuda or fake (a file as GPU memory).", MEMORY)]
DeviceBudget = Annotated[str | None, option('Ceiling on the device, such as "512MiB".', MEMORY)]
HostBudget = Annotated[str | None, option('Ceiling in host memory, such as "2GiB".', MEMORY)]
_NVME = "Folder for swap files, one per drive: --nvme /mnt/a --nvme /mnt/b. Default: a temporary folder."
Nvme = Annotated[tuple[Path, ...], option(_NVME, MEMORY)]
JsonFile = Annotated[Path | None, option("Write the result to this file, as JSON.", OUTPUT)]


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What a step is: the options of everything that runs one, measures one or predicts one."""

    preset: Preset = None
    layers: Layers = None
    hidden: Hidden = None
    seq: Seq = None
    batch: Batch = None
    accumulate: Accumulate = None
    precision: Precision = None
    schedule: Schedule = None


@dataclass(frozen=True, slots=True)
class LoopOptions(StepOptions):
    """The same with what only whole runs choose."""

    heads: Heads = None
    recompute: Recompute = None
    state_format: StateFormat = None


def takes(options: type[_Options]) -> Callable[[Callable[[_Options], None]], _Command]:
    """Make a command of a function of one dataclass: its fields become options, `--debug` is added.

    What goes wrong inside becomes a message and an exit code (`infinity.cli.failures.reported`). A field of
    `tuple[X, ...]` is an option that may be given several times.

    Example:
        @app.command()
        @takes(TrainOptions)
        def train(options: TrainOptions) -> None: ...
    """
    hints = get_type_hints(options, include_extras=True)
    parameters = [_parameter(field, hints[field.name]) for field in fields(options)]  # type: ignore[arg-type]
    parameters.append(_DEBUG)

    def decorate(function: Callable[[_Options], None]) -> _Command:
        def command(*, debug: bool, **given: Any) -> None:
            values = {name: tuple(v or ()) if name in several else v for name, v in given.items()}
            with reported(debug=debug):
                function(options(**values))

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    several = {name for name, hint in hints.items() if get_origin(get_args(hint)[0]) is tuple}
    return decorate


def _parameter(field: Field[Any], hint: Any) -> inspect.Parameter:
    """The parameter of a command that a field becomes; typer knows lists, not tuples of any length."""
    kind, *notes = get_args(hint)
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    if get_origin(kind) is tuple:
        kind, default = GenericAlias(list, get_args(kind)[:1]) | None, None
    annotation: Any = Annotated[(kind, *notes)]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_DEBUG = inspect.Parameter(
    "debug",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, option("Show tracebacks and log messages.", OUTPUT, "--debug")],
)
