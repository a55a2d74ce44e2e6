"""The options of `infinity bench`. Imports only what parsing needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from infinity.cli import options as shared
from infinity.cli.options import OUTPUT, option

_WHAT, _HOW = "What to measure", "How"

_Drives = Annotated[
    tuple[Path, ...],
    typer.Argument(help="A directory on each drive. Default: where swap files would go.", show_default=False),
]


_PROFILE = (
    '"offload", "SEQ1M Q8T1", "SEQ8M Q16", "RND4K Q32", "RND4K Q1" or "sweep"; may be given several times. '
    "Default: offload, SEQ1M Q8T1, RND4K Q32 and sweep."
)
_ENGINES = (
    "Of direct, aio, buffered, aiofiles; such as direct,aiofiles. Default: direct; beside fio the one of "
    "direct and aio that needs less CPU time, if it is as fast."
)
_COMPARE_FIO = "Take turns with fio: reads, writes, half and half. Profiles run only when asked for, then."
_SUSTAINED = 'Write so many bytes, such as "100GiB", to see where the drive becomes slower. It wears the drive.'
_MEMORY = "Host memory, link and kernels too. Default: yes, unless --profile or --compare-fio is given."
_SIZE = "Test file of each drive. Default: 1GiB, less where little is free."
_FIO_ENGINE = "fio's --ioengine, such as io_uring. Default: the fastest for each mix, in huge pages as ours."
_FIO_HUGE_PAGES = "Put the buffers of --fio-engine in huge pages."
_FIO_FILES = "Write a file for each workload to this folder, as fio-plot wants them."
_PLAIN = "Measure computing with the plain model in memory. Without it that bound is left out."


@dataclass(frozen=True, slots=True)
class TierArguments:
    """The options of `tier`, as typed."""

    paths: _Drives = ()
    profile: Annotated[tuple[str, ...], option(_PROFILE, _WHAT)] = ()
    engines: Annotated[str | None, option(_ENGINES, _WHAT)] = None
    compare_fio: Annotated[bool, option(_COMPARE_FIO, _WHAT, "--compare-fio")] = False
    sustained: Annotated[str | None, option(_SUSTAINED, _WHAT)] = None
    memory: Annotated[bool | None, option(_MEMORY, _WHAT, "--memory/--no-memory", show_default=False)] = None
    size: Annotated[str | None, option(_SIZE, _HOW)] = None
    repeats: Annotated[int | None, option("Runs of each workload. Default: 3; 7 beside fio.", _HOW, min=1)] = None
    seconds: Annotated[float, option("Length of a run.", _HOW, min=0.05)] = 1.0
    block: Annotated[str, option("Block size of --compare-fio.", _HOW)] = "1MiB"
    depth: Annotated[int, option("Queue depth of --compare-fio.", _HOW, min=1)] = 8
    fio_engine: Annotated[str | None, option(_FIO_ENGINE, _HOW, show_default=False)] = None
    fio_huge_pages: Annotated[bool, option(_FIO_HUGE_PAGES, _HOW, "--fio-huge-pages")] = False
    json: shared.JsonFile = None
    fio_files: Annotated[Path | None, option(_FIO_FILES, OUTPUT)] = None
    html: Annotated[Path | None, option("Write a page with plots to this file.", OUTPUT)] = None


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
    rounds: Annotated[int, option("Turns of steps and resources.", _HOW, min=1)] = 5
    plain: Annotated[bool, option(_PLAIN, _HOW, "--plain/--no-plain")] = True
    json: shared.JsonFile = None
