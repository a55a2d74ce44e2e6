"""The options of `infinity plan`. Imports only what parsing needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from infinity.cli import options as shared
from infinity.cli.options import MODEL, OUTPUT

_HARDWARE, _SHOW = "Hardware", "What to show"


@dataclass(frozen=True, slots=True)
class PlanOptions(shared.LoopOptions):
    """The options of the command, as typed; None where not given."""

    model: Annotated[
        str | None,
        typer.Option(
            help="A Hugging Face config.json, the folder of one, or MODULE:FACTORY, such as my_models:make.",
            rich_help_panel=MODEL,
        ),
    ] = None
    preset: shared.Preset = "7b"
    gpu: Annotated[
        str | None,
        typer.Option(
            help="A GPU of the table, such as h100, or cpu. Without any hardware option: this machine, once "
            "--calibrate has measured it.",
            show_default="rtx4090",
            rich_help_panel=_HARDWARE,
        ),
    ] = None
    here: Annotated[
        bool,
        typer.Option(
            "--here",
            help="This machine as --calibrate measured it; other options change it.",
            rich_help_panel=_HARDWARE,
        ),
    ] = False
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of a node.", rich_help_panel=_HARDWARE)] = 1
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.", rich_help_panel=_HARDWARE)] = 1
    device_memory: Annotated[
        str | None, typer.Option(help='Of a GPU, instead of the table\'s, such as "24GiB".', rich_help_panel=_HARDWARE)
    ] = None
    host_memory: Annotated[str | None, typer.Option(help='Of a node, such as "128GiB".', rich_help_panel=_HARDWARE)] = (
        None
    )
    drive: Annotated[
        tuple[str, ...],
        typer.Option(
            help="READ:WRITE[:CAPACITY[:ENDURANCE]] in GB/s, such as 7.0:3.4:4TB:2400TBW, or a name of the table; "
            '"4x" before it means four. May be given several times.',
            rich_help_panel=_HARDWARE,
        ),
    ] = ()
    bench: Annotated[
        Path | None,
        typer.Option(help="What `infinity bench tier --json` measured on this machine.", rich_help_panel=_HARDWARE),
    ] = None
    dram: Annotated[
        float | None,
        typer.Option(help="Host memory bandwidth of a node, GB/s, such as 80.", rich_help_panel=_HARDWARE),
    ] = None
    link: Annotated[
        str | None,
        typer.Option(
            help="Host link of a GPU: what a copy reaches each way in GB/s, such as 25, or a name such as pcie4-x8.",
            rich_help_panel=_HARDWARE,
        ),
    ] = None
    network: Annotated[
        float | None, typer.Option(help="Network of a node, GB/s each way, such as 50.", rich_help_panel=_HARDWARE)
    ] = None
    efficiency: Annotated[
        float | None,
        typer.Option(min=0.001, max=1.0, help="Share of the GPU's peak in large products.", rich_help_panel=_HARDWARE),
    ] = None
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure this machine, half a minute and about 3 GB of writes, and keep that for later plans.",
            rich_help_panel=_SHOW,
        ),
    ] = False
    nvme: Annotated[
        tuple[Path, ...],
        typer.Option(
            help="Folder on each drive that --calibrate measures. Default: where swap files would go.",
            rich_help_panel=_SHOW,
        ),
    ] = ()
    replay: Annotated[
        Path | None,
        typer.Option(
            help="Simulate what `infinity train --scheduler-trace` recorded, on its drives or on those of --drive.",
            rich_help_panel=_SHOW,
        ),
    ] = None
    search: Annotated[
        bool, typer.Option("--search", help="Rank all plans for these tokens per step.", rich_help_panel=_SHOW)
    ] = False
    sweep: Annotated[
        str | None,
        typer.Option(
            help="NAME=FIRST..LAST, such as drives=1..8: host-memory, drives, batch, accumulate, gpus or nodes.",
            rich_help_panel=_SHOW,
        ),
    ] = None
    stages: Annotated[
        bool,
        typer.Option("--stages", help="Compare data parallelism, stages, offloading.", rich_help_panel=_SHOW),
    ] = False
    advice: Annotated[
        bool, typer.Option("--advice/--no-advice", help="What to change, with gains.", rich_help_panel=_SHOW)
    ] = True
    json: shared.JsonFile = None
    html: Annotated[
        Path | None, typer.Option(help="Write a page with the timeline to this file.", rich_help_panel=OUTPUT)
    ] = None
    trace: Annotated[
        Path | None, typer.Option(help="Write the step as a Chrome trace to this file.", rich_help_panel=OUTPUT)
    ] = None
