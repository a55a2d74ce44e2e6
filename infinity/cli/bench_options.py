"""The options of `infinity bench`. Imports only what parsing needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from infinity.cli import options as shared
from infinity.cli.options import OUTPUT

_WHAT, _HOW = "What to measure", "How"

_Drives = Annotated[
    tuple[Path, ...],
    typer.Argument(help="A directory on each drive. Default: where swap files would go.", show_default=False),
]


@dataclass(frozen=True, slots=True)
class TierArguments:
    """The options of `tier`, as typed."""

    paths: _Drives = ()
    profile: Annotated[
        tuple[str, ...],
        typer.Option(
            help='"offload", "SEQ1M Q8T1", "SEQ8M Q16", "RND4K Q32", "RND4K Q1" or "sweep"; may be given several '
            "times. Default: offload, SEQ1M Q8T1, RND4K Q32 and sweep.",
            rich_help_panel=_WHAT,
        ),
    ] = ()
    engines: Annotated[
        str | None,
        typer.Option(
            help="Of direct, aio, buffered, aiofiles; such as direct,aiofiles. Default: direct; beside fio the one of "
            "direct and aio that needs less CPU time, if it is as fast.",
            rich_help_panel=_WHAT,
        ),
    ] = None
    compare_fio: Annotated[
        bool,
        typer.Option(
            "--compare-fio",
            help="Take turns with fio: reads, writes, half and half. Profiles run only when asked for, then.",
            rich_help_panel=_WHAT,
        ),
    ] = False
    sustained: Annotated[
        str | None,
        typer.Option(
            help='Write so many bytes, such as "100GiB", to see where the drive becomes slower. It wears the drive.',
            rich_help_panel=_WHAT,
        ),
    ] = None
    memory: Annotated[
        bool | None,
        typer.Option(
            "--memory/--no-memory",
            help="Host memory, link and kernels too. Default: yes, unless --profile or --compare-fio is given.",
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None
    size: Annotated[
        str | None,
        typer.Option(help="Test file of each drive. Default: 1GiB, less where little is free.", rich_help_panel=_HOW),
    ] = None
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Runs of each workload. Default: 3; 7 beside fio.", rich_help_panel=_HOW),
    ] = None
    seconds: Annotated[float, typer.Option(min=0.05, help="Length of a run.", rich_help_panel=_HOW)] = 1.0
    block: Annotated[str, typer.Option(help="Block size of --compare-fio.", rich_help_panel=_HOW)] = "1MiB"
    depth: Annotated[int, typer.Option(min=1, help="Queue depth of --compare-fio.", rich_help_panel=_HOW)] = 8
    fio_engine: Annotated[
        str | None,
        typer.Option(
            help="fio's --ioengine, such as io_uring. Default: the fastest for each mix, in huge pages as ours.",
            show_default=False,
            rich_help_panel=_HOW,
        ),
    ] = None
    fio_huge_pages: Annotated[
        bool,
        typer.Option("--fio-huge-pages", help="Put the buffers of --fio-engine in huge pages.", rich_help_panel=_HOW),
    ] = False
    json: shared.JsonFile = None
    fio_files: Annotated[
        Path | None,
        typer.Option(
            help="Write a file for each workload to this folder, as fio-plot wants them.", rich_help_panel=OUTPUT
        ),
    ] = None
    html: Annotated[Path | None, typer.Option(help="Write a page with plots to this file.", rich_help_panel=OUTPUT)] = (
        None
    )


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """The options of `calibrate`, as typed."""

    paths: _Drives = ()
    json: shared.JsonFile = None


@dataclass(frozen=True, slots=True)
class StepOptions(shared.StepOptions):
    """The options of `step`, as typed; None where nothing was given."""

    preset: shared.Preset = "tiny"
    clip: shared.Clip = None
    device: shared.Device = None
    device_budget: shared.DeviceBudget = None
    host_budget: shared.HostBudget = None
    nvme: shared.Nvme = ()
    rounds: Annotated[int, typer.Option(min=1, help="Turns of steps and resources.", rich_help_panel=_HOW)] = 5
    plain: Annotated[
        bool,
        typer.Option(
            "--plain/--no-plain",
            help="Measure computing with the plain model in memory. Without it that bound is left out.",
            rich_help_panel=_HOW,
        ),
    ] = True
    json: shared.JsonFile = None
