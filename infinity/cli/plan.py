"""`infinity plan`: what a run will do on hardware that need not be here. Imports only what parsing needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infinity.cli.failures import deferred, reported
from infinity.models.presets import describe_presets

_MODEL, _WORK, _HARDWARE, _OUTPUT = "Model", "Workload", "Hardware", "What to show"


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            help="A Hugging Face config.json, the folder of one, or MODULE:FACTORY.", rich_help_panel=_MODEL
        ),
    ] = None,
    preset: Annotated[
        str, typer.Option(help=f"Size of our transformer: {describe_presets()}.", rich_help_panel=_MODEL)
    ] = "7b",
    layers: Annotated[int | None, typer.Option(min=1, help="Number of blocks.", rich_help_panel=_MODEL)] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Channels.", rich_help_panel=_MODEL)] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads.", rich_help_panel=_MODEL)] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens of a sample.", rich_help_panel=_WORK)] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of a micro-batch of one GPU.", rich_help_panel=_WORK)
    ] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.", rich_help_panel=_WORK)] = 1,
    precision: Annotated[str, typer.Option(help="fp32 or bf16.", rich_help_panel=_WORK)] = "bf16",
    schedule: Annotated[
        str, typer.Option(help="auto, overlapped or synchronous.", rich_help_panel=_WORK)
    ] = "auto",
    recompute: Annotated[
        bool,
        typer.Option("--recompute/--no-recompute", help="Recompute activations in backward.", rich_help_panel=_WORK),
    ] = True,
    gpu: Annotated[str, typer.Option(help="A GPU of the table, or cpu.", rich_help_panel=_HARDWARE)] = "rtx4090",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of a node.", rich_help_panel=_HARDWARE)] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.", rich_help_panel=_HARDWARE)] = 1,
    device_memory: Annotated[
        str | None, typer.Option(help='Of a GPU, instead of the table\'s, such as "24GiB".', rich_help_panel=_HARDWARE)
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help='Of a node, such as "128GiB".', rich_help_panel=_HARDWARE)
    ] = None,
    drive: Annotated[
        list[str] | None,
        typer.Option(
            help="READ:WRITE[:CAPACITY[:ENDURANCE]] in GB/s, such as 7.0:3.4:4TB:2400TBW, or a name of the table; "
            '"4x" before it means four. May be given several times.',
            rich_help_panel=_HARDWARE,
        ),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(help="What `infinity bench tier --json` measured on this machine.", rich_help_panel=_HARDWARE),
    ] = None,
    dram: Annotated[
        float | None, typer.Option(help="Host memory bandwidth of a node, GB/s.", rich_help_panel=_HARDWARE)
    ] = None,
    link: Annotated[
        float | None, typer.Option(help="Host link of a GPU, GB/s each way.", rich_help_panel=_HARDWARE)
    ] = None,
    network: Annotated[
        float | None, typer.Option(help="Network of a node, GB/s each way.", rich_help_panel=_HARDWARE)
    ] = None,
    efficiency: Annotated[
        float | None,
        typer.Option(min=0.001, max=1.0, help="Share of the GPU's peak in large products.", rich_help_panel=_HARDWARE),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Rank all plans for these tokens per step.", rich_help_panel=_OUTPUT)
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="NAME=FIRST..LAST: host-memory, drives, batch, accumulate, gpus or nodes.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    stages: Annotated[
        bool,
        typer.Option("--stages", help="Compare data parallelism, stages, offloading.", rich_help_panel=_OUTPUT),
    ] = False,
    advice: Annotated[
        bool, typer.Option("--advice/--no-advice", help="What to change, with gains.", rich_help_panel=_OUTPUT)
    ] = True,
    json: Annotated[Path | None, typer.Option(help="Write the plan to this file.", rich_help_panel=_OUTPUT)] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with the timeline to this file.", rich_help_panel=_OUTPUT)
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the step as a Chrome trace to this file.", rich_help_panel=_OUTPUT)
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.", rich_help_panel=_OUTPUT)] = False,
) -> None:
    """Predict fit, traffic, step time and wear of a run, on hardware that need not be here.

    \b
    infinity plan --preset 7b --gpu rtx4090 --host-memory 64GiB --drive 2x7.0:3.4:4TB:2400TBW
    infinity plan --model path/to/config.json --seq 4096 --gpu h100 --gpus 8 --host-memory 1TiB --drive 8xp5510
    infinity plan --preset 7b --sweep host-memory=64GiB..512GiB --html sweep.html
    infinity plan --layers 48 --hidden 1600 --gpus 8 --nodes 8 --stages
    """
    with reported(debug=debug):
        with deferred():
            from infinity.cli.plan_run import PlanOptions, run

        run(
            PlanOptions(
                model=model,
                preset=preset,
                layers=layers,
                hidden=hidden,
                heads=heads,
                seq=seq,
                batch=batch,
                accumulate=accumulate,
                precision=precision,
                schedule=schedule,
                recompute=recompute,
                gpu=gpu,
                gpus=gpus,
                nodes=nodes,
                device_memory=device_memory,
                host_memory=host_memory,
                drives=tuple(drive or ()),
                bench=bench,
                dram=dram,
                link=link,
                network=network,
                efficiency=efficiency,
                search=search,
                sweep=sweep,
                stages=stages,
                advice=advice,
                json=json,
                html=html,
                trace=trace,
            )
        )
