"""`infinity checkpoint`: look into checkpoints, check, rewrite and export them. Imports what parsing needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from infinity.cli.options import EPILOG, JsonFile, takes
from infinity.cli.stopping import deferred

app = typer.Typer(
    help="Look into checkpoints, check them, rewrite them, and take them to other programs and from them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Checkpoint = Annotated[
    Path, typer.Argument(help="A folder of engine.save() or --save, or one with a series of them.", show_default=False)
]
Target = Annotated[Path, typer.Argument(help="The folder to make.", show_default=False)]
ShardSize = Annotated[str, typer.Option(help="Most bytes of tensors in a file.")]


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """The options of `inspect`, as typed."""

    checkpoint: Checkpoint
    parameters: Annotated[bool, typer.Option("--parameters", help="List every parameter.")] = False
    json: JsonFile = None


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The options of `verify`, as typed."""

    checkpoint: Checkpoint
    json: JsonFile = None


@dataclass(frozen=True, slots=True)
class ExportCommandOptions:
    """The options of `export`, as typed."""

    checkpoint: Checkpoint
    target: Target
    shard_size: ShardSize = "5GB"  # what transformers cuts at
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16.", show_default="that in which the run computed")
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(
            help="Copy configuration and tokenizer from this folder.", show_default="what the checkpoint has of it"
        ),
    ] = None
    merge: Annotated[bool, typer.Option("--merge", help="Add the LoRA adapter to the weights and write these.")] = False
    adapter: Annotated[str, typer.Option(help="Which adapter of a model of PEFT.")] = "default"
    json: JsonFile = None


@dataclass(frozen=True, slots=True)
class ReshardOptions:
    """The options of `reshard`, as typed."""

    checkpoint: Checkpoint
    target: Target
    shard_size: ShardSize = "4GiB"
    json: JsonFile = None


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """The options of `import`, as typed."""

    source: Annotated[
        Path,
        typer.Argument(
            help="A ZeRO checkpoint folder of DeepSpeed, or a torch.save file with a model's state_dict().",
            show_default=False,
        ),
    ]
    target: Target
    optimizer: Annotated[
        Path | None,
        typer.Option(help="A torch.save file with the state_dict() of AdamW, if it is not in the same file."),
    ] = None
    names: Annotated[
        Path | None,
        typer.Option(help="A file with the parameters' names in the optimizer's order, one a line, if it has none."),
    ] = None
    json: JsonFile = None


@app.command(epilog=EPILOG)
@takes(InspectOptions)
def inspect(options: InspectOptions) -> None:
    """Say what a checkpoint holds, without reading its tensors.

    \b
    infinity checkpoint inspect run1
    infinity checkpoint inspect run1 --parameters
    """
    with deferred():
        from infinity.cli.checkpoint_run import run_inspect

    run_inspect(options)


@app.command(epilog=EPILOG)
@takes(VerifyOptions)
def verify(options: VerifyOptions) -> None:
    """Read every byte of a checkpoint, compare it with its checksums, and see that nothing is missing.

    \b
    infinity checkpoint verify run1
    """
    with deferred():
        from infinity.cli.checkpoint_run import run_verify

    run_verify(options)


@app.command(epilog=EPILOG)
@takes(ExportCommandOptions)
def export(options: ExportCommandOptions) -> None:
    """Write the weights as safetensors files that transformers and PEFT load.

    A model of PEFT gives its adapter, or, with --merge, the model with the adapter in it.

    \b
    infinity checkpoint export run1 out --dtype bf16
    infinity checkpoint export run1 out --config path/to/base/model --shard-size 2GB
    infinity checkpoint export lora1 merged --merge
    """
    with deferred():
        from infinity.cli.checkpoint_run import run_export

    run_export(options)


@app.command(epilog=EPILOG)
@takes(ReshardOptions)
def reshard(options: ReshardOptions) -> None:
    """Write a checkpoint anew in files of another size, for moving it. Any number of ranks loads any checkpoint.

    \b
    infinity checkpoint reshard run1 run1-small --shard-size 1GB
    """
    with deferred():
        from infinity.cli.checkpoint_run import run_reshard

    run_reshard(options)


@app.command("import", epilog=EPILOG)
@takes(ImportOptions)
def take_over(options: ImportOptions) -> None:
    """Make a checkpoint of one of DeepSpeed (ZeRO stages 1 to 3) or of torch.save: parameters, AdamW's state, step.

    Load it with engine.load(); the engine decides how the state is sharded and placed.

    \b
    infinity checkpoint import zero_run/global_step1000 run1
    infinity checkpoint import model.pt run1 --optimizer optimizer.pt
    """
    with deferred():
        from infinity.cli.checkpoint_run import run_import

    run_import(options)
