"""Options of commands, declared once: a command's options are the fields of a dataclass, each with its help.

Imports only what parsing needs. What several commands ask for has one declaration here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from infinity.cli.failures import reported
from infinity.models.presets import describe_presets

EPILOG = "Exit codes: 0 success, 2 bad usage or impossible plan, 130 stopped by Ctrl-C, 1 any other failure."

MODEL, TRAINING, MEMORY, OUTPUT = "Model", "Training", "Memory and disks", "Output"

_Options = TypeVar("_Options")
_Command = Callable[..., None]

PRESET_HELP = f"Size of the model: {describe_presets()}."

Preset = Annotated[str | None, typer.Option(help=PRESET_HELP, rich_help_panel=MODEL)]
Layers = Annotated[int | None, typer.Option(min=1, help="Number of blocks, such as 24.", rich_help_panel=MODEL)]
Hidden = Annotated[int | None, typer.Option(min=1, help="Channels, such as 1024.", rich_help_panel=MODEL)]
Heads = Annotated[int | None, typer.Option(min=1, help="Attention heads; must divide --hidden.", rich_help_panel=MODEL)]
Seq = Annotated[int | None, typer.Option(min=1, help="Tokens of a sample (bytes, in train).", rich_help_panel=MODEL)]
Recompute = Annotated[
    bool | None,
    typer.Option(
        "--recompute/--no-recompute",
        help="Recompute activations in backward. Default: yes; in train and bench step as the preset has it.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
Batch = Annotated[int | None, typer.Option(min=1, help="Samples of a batch, on each rank.", rich_help_panel=TRAINING)]
Accumulate = Annotated[
    int | None,
    typer.Option(min=1, help="Batches of a step.", show_default="1", rich_help_panel=TRAINING),
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Slices in which every unit runs the batch while it is gathered once: --batch 8 --micro-batches 4 trains "
        "as --batch 2 --accumulate 4 would, and reads a quarter of its parameters.",
        show_default="1",
        rich_help_panel=TRAINING,
    ),
]
Clip = Annotated[float | None, typer.Option(help="Largest gradient norm, such as 1.0.", rich_help_panel=TRAINING)]
Precision = Annotated[str | None, typer.Option(help="fp32 or bf16.", show_default="bf16", rich_help_panel=TRAINING)]
Activations = Annotated[
    str | None,
    typer.Option(
        help="What units save for backward: none (all), or inputs only: recompute (on the device), host or nvme.",
        show_default="none",
        rich_help_panel=TRAINING,
    ),
]
StateFormat = Annotated[
    str | None,
    typer.Option(
        help="How AdamW's moments are stored in bf16: fp32, or rounded to bf16 or int8: fewer bytes, other bits.",
        show_default="fp32",
        rich_help_panel=TRAINING,
    ),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        help="When units are updated: auto, overlapped, deferred or synchronous.",
        show_default="auto",
        rich_help_panel=TRAINING,
    ),
]
Device = Annotated[
    str | None, typer.Option(help="auto, cpu, cuda or fake (a file as GPU memory).", rich_help_panel=MEMORY)
]
DeviceBudget = Annotated[
    str | None, typer.Option(help='Ceiling on the device, such as "512MiB".', rich_help_panel=MEMORY)
]
HostBudget = Annotated[str | None, typer.Option(help='Ceiling in host memory, such as "2GiB".', rich_help_panel=MEMORY)]
Nvme = Annotated[
    tuple[Path, ...],
    typer.Option(
        help="Folder for swap files, one per drive: --nvme /mnt/a --nvme /mnt/b. Default: a temporary folder.",
        rich_help_panel=MEMORY,
    ),
]
JsonFile = Annotated[Path | None, typer.Option(help="Write the result to this file, as JSON.", rich_help_panel=OUTPUT)]


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
    annotation=Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and log messages.", rich_help_panel=OUTPUT)
    ],
)
