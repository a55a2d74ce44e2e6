"""The options of `infinity train`. Imports only what parsing needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from infinity.cli import options as shared
from infinity.cli.options import MEMORY, MODEL, OUTPUT, TRAINING
from infinity.models.presets import DEFAULT_PRESET


@dataclass(frozen=True, slots=True)
class TrainOptions(shared.LoopOptions):
    """The options as given on the command line; None where nothing was given."""

    preset: Annotated[
        str | None, typer.Option(help=shared.PRESET_HELP, show_default=DEFAULT_PRESET, rich_help_panel=MODEL)
    ] = None
    activations: shared.Activations = None
    micro_batches: shared.MicroBatches = None
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to run now.", rich_help_panel=TRAINING)] = None
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Fixes first values and samples.", show_default="0", rich_help_panel=TRAINING),
    ] = None
    lr: Annotated[float | None, typer.Option(min=0, help="Learning rate, such as 3e-4.", rich_help_panel=TRAINING)] = (
        None
    )
    clip: shared.Clip = None
    data: Annotated[
        tuple[Path, ...],
        typer.Option(
            help="Text file or folder: --data books/ --data notes.txt. Default: Python's own documentation.",
            rich_help_panel=TRAINING,
        ),
    ] = ()
    config: Annotated[
        Path | None,
        typer.Option(
            help="Engine settings, such as settings.toml (TOML or JSON); options go before it.", rich_help_panel=MEMORY
        ),
    ] = None
    device: shared.Device = None
    device_budget: shared.DeviceBudget = None
    host_budget: shared.HostBudget = None
    nvme: shared.Nvme = ()
    io_timeout: Annotated[
        float | None, typer.Option(help="Seconds without any progress until an error.", rich_help_panel=MEMORY)
    ] = None
    io_log: Annotated[
        Path | None,
        typer.Option(
            help="Write every transfer to this file, such as run.iolog, for fio to replay.", rich_help_panel=OUTPUT
        ),
    ] = None
    durability: Annotated[
        str | None,
        typer.Option(
            help="What survives a crash: none, checkpoint (what --save writes) or step (every step, in --nvme).",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    save: Annotated[Path | None, typer.Option(help="Save to this folder at the end.", rich_help_panel=OUTPUT)] = None
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Continue from this checkpoint folder, or from the --nvme folder of a run with --durability step.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Repeat the run in plain PyTorch and compare.", rich_help_panel=OUTPUT)
    ] = False
    json: shared.JsonFile = None
    metrics: Annotated[
        Path | None, typer.Option(help="Write a JSON line per step to this file.", rich_help_panel=OUTPUT)
    ] = None
    scheduler_trace: Annotated[
        Path | None,
        typer.Option(
            help="Write what the scheduler saw and did to this file, for `infinity plan --replay`.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace to this file.", rich_help_panel=OUTPUT)
    ] = None
    record: Annotated[
        Path | None,
        typer.Option(
            help="Write result, steps and trace to this folder, for `infinity report`.", rich_help_panel=OUTPUT
        ),
    ] = None
