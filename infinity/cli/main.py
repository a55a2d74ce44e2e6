"""The `infinity` command. This module imports only what parsing needs; torch comes with the command that uses it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from infinity.cli.bench import app as bench
from infinity.cli.checkpoint import app as checkpoint
from infinity.cli.doctor import doctor
from infinity.cli.migrate import migrate
from infinity.cli.options import EPILOG, JsonFile, takes
from infinity.cli.plan import plan
from infinity.cli.report_page import report
from infinity.cli.stopping import deferred
from infinity.cli.train_options import TrainOptions
from infinity.versions import infinity_version


@dataclass(frozen=True, slots=True)
class CleanOptions:
    """The options of `clean`, as typed."""

    directory: Annotated[
        Path, typer.Argument(help="The folder that --nvme was given, or the temporary one.", show_default=False)
    ]
    json: JsonFile = None
    resumable: Annotated[
        bool, typer.Option("--resumable", help="Remove runs with durable steps too; they are lost then.")
    ] = False


app = typer.Typer(
    name="infinity",
    help="Train PyTorch models bigger than GPU and CPU memory together. `infinity train` needs no argument.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")
app.add_typer(checkpoint, name="checkpoint")
app.command(epilog=EPILOG)(doctor)
app.command(epilog=EPILOG)(plan)
app.command(epilog=EPILOG)(migrate)
app.command(epilog=EPILOG)(report)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"infinity {infinity_version()}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command(epilog=EPILOG)
@takes(TrainOptions)
def train(options: TrainOptions) -> None:
    """Train a byte-level transformer whose state is larger than the memory it may use.

    \b
    infinity train                            the default model, a minute or two
    infinity train --preset tiny --baseline --precision fp32
    infinity train --preset 1b --nvme /mnt/a --nvme /mnt/b --host-budget 4GiB
    infinity train --data books/ --layers 24 --hidden 1024 --save run1
    infinity train --batch 16 --micro-batches 4 --config settings.toml --json run.json
    """
    with deferred():
        from infinity.cli.train import train as run

    run(options)


@app.command(epilog=EPILOG)
@takes(CleanOptions)
def clean(options: CleanOptions) -> None:
    """Remove swap folders, and unfinished saves, whose owner is dead; one whose owner runs is never touched.

    \b
    infinity clean /mnt/nvme0
    infinity clean runs                        the folder that checkpoints lie in
    infinity clean /mnt/nvme0 --resumable      also what a run with durable steps could go on with
    """
    from infinity.cli.clean import clean as run

    run(options.directory, options.json, resumable=options.resumable)


def main() -> None:
    """Entry point of the console script."""
    app()
