"""The options of `infinity train`. Imports only what parsing needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from infinity.cli import options as shared
from infinity.cli.options import MEMORY, MODEL, OUTPUT, TRAINING, option
from infinity.models.presets import DEFAULT_PRESET

_DATA = "Text file or folder: --data books/ --data notes.txt. Default: Python's own documentation."
_CONFIG = "Engine settings, such as settings.toml (TOML or JSON); options go before it."
_IO_LOG = "Write every transfer to this file, such as run.iolog, for fio to replay."
_DURABILITY = "What survives a crash: none, checkpoint (what --save writes) or step (every step, in --nvme)."
_RESUME = "Continue from this checkpoint folder, or from the --nvme folder of a run with --durability step."
_SCHEDULER_TRACE = "Write what the scheduler saw and did to this file, for `infinity plan --replay`."
_RECORD = "Write result, steps and trace to this folder, for `infinity report`."
_LARGEST_SEED = (1 << 63) - 1  # of torch's generators
_SEED = option("Fixes first values and samples.", TRAINING, min=0, max=_LARGEST_SEED, show_default="0")


@dataclass(frozen=True, slots=True)
class TrainOptions(shared.LoopOptions):
    """The options as given on the command line; None where nothing was given."""

    preset: Annotated[str | None, option(shared.PRESET_HELP, MODEL, show_default=DEFAULT_PRESET)] = None
    activations: shared.Activations = None
    micro_batches: shared.MicroBatches = None
    steps: Annotated[int | None, option("Steps to run now.", TRAINING, min=1)] = None
    seed: Annotated[int | None, _SEED] = None
    lr: Annotated[float | None, option("Learning rate, such as 3e-4.", TRAINING, min=0)] = None
    clip: shared.Clip = None
    data: Annotated[tuple[Path, ...], option(_DATA, TRAINING)] = ()
    config: Annotated[Path | None, option(_CONFIG, MEMORY)] = None
    device: shared.Device = None
    device_budget: shared.DeviceBudget = None
    host_budget: shared.HostBudget = None
    nvme: shared.Nvme = ()
    io_timeout: Annotated[float | None, option("Seconds without any progress until an error.", MEMORY)] = None
    io_log: Annotated[Path | None, option(_IO_LOG, OUTPUT)] = None
    durability: Annotated[str | None, option(_DURABILITY, OUTPUT)] = None
    save: Annotated[Path | None, option("Save to this folder at the end.", OUTPUT)] = None
    resume: Annotated[Path | None, option(_RESUME, OUTPUT)] = None
    baseline: Annotated[bool, option("Repeat the run in plain PyTorch and compare.", OUTPUT, "--baseline")] = False
    json: shared.JsonFile = None
    metrics: Annotated[Path | None, option("Write a JSON line per step to this file.", OUTPUT)] = None
    scheduler_trace: Annotated[Path | None, option(_SCHEDULER_TRACE, OUTPUT)] = None
    trace: Annotated[Path | None, option("Write a Chrome trace to this file.", OUTPUT)] = None
    record: Annotated[Path | None, option(_RECORD, OUTPUT)] = None
