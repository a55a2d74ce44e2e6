"""`infinity plan`: what a run will do on hardware that need not be here. Imports only what parsing needs."""

from __future__ import annotations

from contextlib import nullcontext

from infinity.cli.garbage import seldom_collected
from infinity.cli.options import takes
from infinity.cli.plan_options import PlanOptions
from infinity.cli.stopping import deferred


@takes(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Predict fit, traffic, step time and wear of a run, on hardware that need not be here.

    \b
    infinity plan --preset 7b --gpu rtx4090 --host-memory 64GiB --drive 2x7.0:3.4:4TB:2400TBW
    infinity plan --model path/to/config.json --seq 4096 --gpu h100 --gpus 8 --host-memory 1TiB --drive 8x6.5:3.4
    infinity plan --preset 7b --sweep host-memory=64GiB..512GiB --html sweep.html
    infinity plan --calibrate --nvme /mnt/nvme0          measure this machine; plans without hardware options are of it
    infinity plan --here --preset 1b --drive 2x7.0:3.4    this machine with other drives
    infinity plan --replay run.scheduler --drive 7:3.4    a recorded run on another drive
    infinity plan --layers 48 --hidden 1600 --gpus 8 --nodes 8 --stages
    """
    with nullcontext() if options.calibrate else seldom_collected():  # what is measured goes as a run does
        with deferred():
            from infinity.cli.plan_run import run

        run(options)
