"""The options of `infinity plan`. Imports only what parsing needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from infinity.cli import options as shared
from infinity.cli.options import MODEL, OUTPUT, option

_HARDWARE, _SHOW = "Hardware", "What to show"

_MODEL = "A Hugging Face config.json, the folder of one, or MODULE:FACTORY, such as my_models:make."
_GPU = (
    "A GPU of the table, such as h100, or cpu. Without any hardware option: this machine, once --calibrate has "
    "measured it."
)
_HERE = "This machine as --calibrate measured it; other options change it."
_DEVICE_MEMORY = 'Of a GPU, instead of the table\'s, such as "24GiB".'
_DRIVE = (
    "READ:WRITE[:CAPACITY[:ENDURANCE]] in GB/s, such as 7.0:3.4:4TB:2400TBW, or a name of the table; "
    '"4x" before it means four. May be given several times.'
)
_BENCH = "What `infinity bench tier --json` measured on this machine."
_LINK = "Host link of a GPU: what a copy reaches each way in GB/s, such as 25, or a name such as pcie4-x8."
_EFFICIENCY = "Share of the GPU's peak in large products."
_CALIBRATE = "Measure this machine, half a minute and about 3 GB of writes, and keep that for later plans."
_NVME = "Folder on each drive that --calibrate measures. Default: where swap files would go."
_REPLAY = "Simulate what `infinity train --scheduler-trace` recorded, on its drives or on those of --drive."
_SWEEP = "NAME=FIRST..LAST, such as drives=1..8: host-memory, drives, batch, accumulate, gpus or nodes."


@dataclass(frozen=True, slots=True)
class PlanOptions(shared.LoopOptions):
    """The options of the command, as typed; None where not given."""

    model: Annotated[str | None, option(_MODEL, MODEL)] = None
    preset: shared.Preset = "7b"
    micro_batches: shared.MicroBatches = None
    gpu: Annotated[str | None, option(_GPU, _HARDWARE, show_default="rtx4090")] = None
    here: Annotated[bool, option(_HERE, _HARDWARE, "--here")] = False
    gpus: Annotated[int, option("GPUs of a node.", _HARDWARE, min=1)] = 1
    nodes: Annotated[int, option("Nodes.", _HARDWARE, min=1)] = 1
    device_memory: Annotated[str | None, option(_DEVICE_MEMORY, _HARDWARE)] = None
    host_memory: Annotated[str | None, option('Of a node, such as "128GiB".', _HARDWARE)] = None
    drive: Annotated[tuple[str, ...], option(_DRIVE, _HARDWARE)] = ()
    bench: Annotated[Path | None, option(_BENCH, _HARDWARE)] = None
    dram: Annotated[float | None, option("Host memory bandwidth of a node, GB/s, such as 80.", _HARDWARE)] = None
    link: Annotated[str | None, option(_LINK, _HARDWARE)] = None
    network: Annotated[float | None, option("Network of a node, GB/s each way, such as 50.", _HARDWARE)] = None
    efficiency: Annotated[float | None, option(_EFFICIENCY, _HARDWARE, min=0.001, max=1.0)] = None
    calibrate: Annotated[bool, option(_CALIBRATE, _SHOW, "--calibrate")] = False
    nvme: Annotated[tuple[Path, ...], option(_NVME, _SHOW)] = ()
    replay: Annotated[Path | None, option(_REPLAY, _SHOW)] = None
    search: Annotated[bool, option("Rank all plans for these tokens per step.", _SHOW, "--search")] = False
    sweep: Annotated[str | None, option(_SWEEP, _SHOW)] = None
    stages: Annotated[bool, option("Compare data parallelism, stages, offloading.", _SHOW, "--stages")] = False
    advice: Annotated[bool, option("What to change, with gains.", _SHOW, "--advice/--no-advice")] = True
    json: shared.JsonFile = None
    html: Annotated[Path | None, option("Write a page with the timeline to this file.", OUTPUT)] = None
    trace: Annotated[Path | None, option("Write the step as a Chrome trace to this file.", OUTPUT)] = None
