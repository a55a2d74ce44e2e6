"""`infinity bench`: what drives, memory and links really give. Imports only what parsing needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infinity.cli.failures import reported

app = typer.Typer(
    help="Measure drives, memory, links and optimizer kernels.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_WHAT, _HOW, _OUTPUT = "What to measure", "How", "Output"


@app.callback()
def _group() -> None:
    """Keeps `tier` a name of its own while it is the only command."""


@app.command()
def tier(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="A directory on each drive. Default: where swap files would go.", show_default=False),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            help='"offload", "SEQ1M Q8T1", "SEQ8M Q16", "RND4K Q32", "RND4K Q1" or "sweep"; may be given several '
            "times. Default: offload, SEQ1M Q8T1, RND4K Q32 and sweep.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    engines: Annotated[
        str, typer.Option(help="Of direct, buffered, aiofiles; with commas between.", rich_help_panel=_WHAT)
    ] = "direct",
    compare_fio: Annotated[
        bool,
        typer.Option(
            "--compare-fio",
            help="Take turns with fio: reads, writes, half and half. Profiles run only when asked for, then.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    sustained: Annotated[
        str | None,
        typer.Option(
            help='Write so many bytes, such as "100GiB", to see where the drive becomes slower. It wears the drive.',
            rich_help_panel=_WHAT,
        ),
    ] = None,
    memory: Annotated[
        bool | None,
        typer.Option(
            "--memory/--no-memory",
            help="Host memory, link and kernels too. Default: yes, unless --profile or --compare-fio is given.",
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="Test file of each drive. Default: 1GiB, less where little is free.", rich_help_panel=_HOW),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Runs of each workload. Default: 3; 7 beside fio.", rich_help_panel=_HOW),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.05, help="Length of a run.", rich_help_panel=_HOW)] = 1.0,
    block: Annotated[str, typer.Option(help="Block size of --compare-fio.", rich_help_panel=_HOW)] = "1MiB",
    depth: Annotated[int, typer.Option(min=1, help="Queue depth of --compare-fio.", rich_help_panel=_HOW)] = 8,
    fio_engine: Annotated[str, typer.Option(help="fio's --ioengine.", rich_help_panel=_HOW)] = "libaio",
    fio_huge_pages: Annotated[
        bool,
        typer.Option("--fio-huge-pages", help="Put fio's buffers in huge pages, as ours are.", rich_help_panel=_HOW),
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write the result to this file, in fio's shape.", rich_help_panel=_OUTPUT)
    ] = None,
    fio_files: Annotated[
        Path | None,
        typer.Option(
            help="Write a file for each workload to this folder, as fio-plot wants them.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with plots to this file.", rich_help_panel=_OUTPUT)
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.", rich_help_panel=_OUTPUT)] = False,
) -> None:
    """Measure drives through the same code that training uses, and memory, links and optimizer kernels.

    \b
    infinity bench tier                                  the default directory, less than a minute
    infinity bench tier /mnt/nvme0 /mnt/nvme1            each alone, and both together
    infinity bench tier /mnt/nvme0 --compare-fio --json result.json
    infinity bench tier /mnt/nvme0 --engines direct,buffered,aiofiles --profile seq1m
    infinity bench tier /mnt/nvme0 --sustained 200GiB --html drive.html
    """
    with reported(debug=debug):
        from infinity.cli.bench_tier import TierArguments, run

        run(
            TierArguments(
                paths=tuple(paths or ()),
                profiles=tuple(profile or ()),
                engines=engines,
                compare_fio=compare_fio,
                sustained=sustained,
                memory=memory,
                size=size,
                repeats=repeats,
                seconds=seconds,
                block=block,
                depth=depth,
                fio_engine=fio_engine,
                fio_huge_pages=fio_huge_pages,
                json=json,
                fio_files=fio_files,
                html=html,
            )
        )


@app.command()
def calibrate(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="A directory on each drive. Default: where swap files would go.", show_default=False),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write what was found to this file.", rich_help_panel=_OUTPUT)
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.", rich_help_panel=_OUTPUT)] = False,
) -> None:
    """Find the block size and number of threads that suit each drive; later runs on it use them.

    Takes a second or two per drive. What is found is kept in the user's cache folder for 90 days, by drive. A run with
    nvme.threads or nvme.block_nbytes set, or with nvme.calibrate = "off", does not look at it.
    """
    with reported(debug=debug):
        from infinity.cli.bench_calibrate import run

        run(tuple(paths or ()), json)


@app.command()
def step(
    preset: Annotated[str, typer.Option(help="The model, as in infinity train.", rich_help_panel=_WHAT)] = "tiny",
    layers: Annotated[int | None, typer.Option(min=1, rich_help_panel=_WHAT)] = None,
    hidden: Annotated[int | None, typer.Option(min=1, rich_help_panel=_WHAT)] = None,
    seq: Annotated[int | None, typer.Option(min=1, rich_help_panel=_WHAT)] = None,
    batch: Annotated[int | None, typer.Option(min=1, rich_help_panel=_WHAT)] = None,
    accumulate: Annotated[int, typer.Option(min=1, rich_help_panel=_WHAT)] = 1,
    clip: Annotated[float | None, typer.Option(help="Clip to this norm.", rich_help_panel=_WHAT)] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.", rich_help_panel=_WHAT)] = None,
    schedule: Annotated[
        str | None, typer.Option(help="auto, overlapped, deferred or synchronous.", rich_help_panel=_WHAT)
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cuda, cpu or fake.", rich_help_panel=_HOW)] = None,
    device_budget: Annotated[str | None, typer.Option(rich_help_panel=_HOW)] = None,
    host_budget: Annotated[str | None, typer.Option(rich_help_panel=_HOW)] = None,
    nvme: Annotated[
        list[Path] | None, typer.Option(help="Folder for swap files, one per drive.", rich_help_panel=_HOW)
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of steps and resources.", rich_help_panel=_HOW)] = 5,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain/--no-plain",
            help="Measure computing with the plain model in memory. Without it that bound is left out.",
            rich_help_panel=_HOW,
        ),
    ] = True,
    json: Annotated[Path | None, typer.Option(help="Write the result to this file.", rich_help_panel=_OUTPUT)] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.", rich_help_panel=_OUTPUT)] = False,
) -> None:
    """Measure one training step against its bound: what its slowest resource needs by itself.

    Steps and resources take turns: the engine's step, the drives with the step's bytes, the plain model in memory, the
    optimizer's kernel. What a step takes beyond the bound is accounted for by cause.
    """
    with reported(debug=debug):
        from infinity.cli.bench_step import run
        from infinity.cli.settings import TrainOptions

        options = TrainOptions(
            preset=preset,
            layers=layers,
            hidden=hidden,
            seq=seq,
            batch=batch,
            accumulate=accumulate,
            clip=clip,
            precision=precision,
            schedule=schedule,
            device=device,
            device_budget=device_budget,
            host_budget=host_budget,
            nvme=tuple(nvme or ()),
        )
        run(options, rounds=rounds, compares_plain=plain, json_path=json)
