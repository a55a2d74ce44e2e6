"""The `infinity` command. This module imports only what parsing needs; torch comes with the command that uses it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from infinity.cli.bench import app as bench
from infinity.cli.doctor import doctor
from infinity.cli.failures import deferred, reported
from infinity.cli.migrate import migrate
from infinity.cli.plan import plan
from infinity.models.presets import DEFAULT_PRESET, describe_presets

_EPILOG = "Exit codes: 0 success, 2 bad usage or impossible plan, 130 stopped by Ctrl-C, 1 any other failure."

app = typer.Typer(
    name="infinity",
    help="Train PyTorch models bigger than GPU and CPU memory together. `infinity train` needs no argument.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")
app.command(epilog=_EPILOG)(doctor)
app.command(epilog=_EPILOG)(plan)
app.command(epilog=_EPILOG)(migrate)


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"infinity {version('infinity-offload')}")
        except PackageNotFoundError:  # run from a checkout that is not installed
            from infinity import __version__

            typer.echo(f"infinity {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself."""


_MODEL, _TRAINING, _MEMORY, _OUTPUT = "Model", "Training", "Memory and disks", "Output"


@app.command(epilog=_EPILOG)
def train(
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"Size of the model: {describe_presets()}.", show_default=DEFAULT_PRESET, rich_help_panel=_MODEL
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Number of blocks.", rich_help_panel=_MODEL)] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Channels.", rich_help_panel=_MODEL)] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads.", rich_help_panel=_MODEL)] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Bytes of a sample.", rich_help_panel=_MODEL)] = None,
    recompute: Annotated[
        bool | None,
        typer.Option("--recompute/--no-recompute", help="Recompute activations in backward.", rich_help_panel=_MODEL),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples of a batch.", rich_help_panel=_TRAINING)] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(min=1, help="Batches of a step.", show_default="1", rich_help_panel=_TRAINING),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to run now.", rich_help_panel=_TRAINING)] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Fixes first values and samples.", show_default="0", rich_help_panel=_TRAINING),
    ] = None,
    lr: Annotated[float | None, typer.Option(min=0, help="Learning rate.", rich_help_panel=_TRAINING)] = None,
    clip: Annotated[
        float | None, typer.Option(help="Largest gradient norm.", rich_help_panel=_TRAINING)
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text file or folder; may be given several times. Default: Python's own documentation.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Engine settings, TOML or JSON; options go before it.", rich_help_panel=_MEMORY),
    ] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16.", rich_help_panel=_MEMORY)] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda or fake (a file as GPU memory).", rich_help_panel=_MEMORY)
    ] = None,
    device_budget: Annotated[
        str | None, typer.Option(help='Ceiling on the device, such as "512MiB".', rich_help_panel=_MEMORY)
    ] = None,
    host_budget: Annotated[
        str | None, typer.Option(help='Ceiling in host memory, such as "2GiB".', rich_help_panel=_MEMORY)
    ] = None,
    nvme: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder for swap files, one per drive; may be given several times. Default: a temporary folder.",
            rich_help_panel=_MEMORY,
        ),
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="auto, overlapped, deferred or synchronous.", rich_help_panel=_MEMORY)
    ] = None,
    io_timeout: Annotated[
        float | None, typer.Option(help="Seconds without any progress until an error.", rich_help_panel=_MEMORY)
    ] = None,
    io_log: Annotated[
        Path | None,
        typer.Option(help="Write every transfer to this file, for fio to replay.", rich_help_panel=_OUTPUT),
    ] = None,
    durability: Annotated[
        str | None,
        typer.Option(
            help="What survives a crash: none, checkpoint (what --save writes) or step (every step, in --nvme).",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Save to this folder at the end.", rich_help_panel=_OUTPUT)] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Continue from this checkpoint folder, or from the --nvme folder of a run with --durability step.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Repeat the run in plain PyTorch and compare.", rich_help_panel=_OUTPUT)
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write a report to this file.", rich_help_panel=_OUTPUT)] = None,
    metrics: Annotated[
        Path | None, typer.Option(help="Write a JSON line per step to this file.", rich_help_panel=_OUTPUT)
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace to this file.", rich_help_panel=_OUTPUT)
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and log messages.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    """Train a byte-level transformer whose state is larger than the memory it may use.

    \b
    infinity train                            the default model, a minute or two
    infinity train --preset tiny --baseline --precision fp32
    infinity train --preset 1b --nvme /mnt/a --nvme /mnt/b --host-budget 4GiB
    infinity train --data books/ --layers 24 --hidden 1024 --save run1
    """
    with reported(debug=debug):
        with deferred():
            from infinity.cli.settings import TrainOptions
            from infinity.cli.train import train as run

        run(
            TrainOptions(
                preset=preset,
                layers=layers,
                hidden=hidden,
                heads=heads,
                seq=seq,
                batch=batch,
                accumulate=accumulate,
                steps=steps,
                seed=seed,
                lr=lr,
                clip=clip,
                recompute=recompute,
                data=tuple(data or ()),
                config=config,
                precision=precision,
                device=device,
                device_budget=device_budget,
                host_budget=host_budget,
                nvme=tuple(nvme or ()),
                schedule=schedule,
                io_timeout=io_timeout,
                io_log=io_log,
                durability=durability,
                save=save,
                resume=resume,
                trace=trace,
                metrics=metrics,
                json=json,
                baseline=baseline,
            )
        )


@app.command(epilog=_EPILOG)
def clean(
    directory: Annotated[
        Path, typer.Argument(help="The folder that --nvme was given, or the temporary one.", show_default=False)
    ],
    json: Annotated[Path | None, typer.Option(help="Write what was removed and left to this file.")] = None,
    resumable: Annotated[
        bool, typer.Option("--resumable", help="Remove runs with durable steps too; they are lost then.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Remove swap folders whose owner is dead; one whose owner runs is never touched.

    \b
    infinity clean /mnt/nvme0
    """
    with reported(debug=debug):
        from infinity.cli.clean import clean as run

        run(directory, json, resumable=resumable)


def main() -> None:
    """Entry point of the console script."""
    app()
