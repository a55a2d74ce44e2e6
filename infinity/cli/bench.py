"""`infinity bench`: what drives, memory and links really give. Imports only what parsing needs."""

from __future__ import annotations

import typer

from infinity.cli.bench_options import CalibrateOptions, StepOptions, TierArguments
from infinity.cli.options import EPILOG, takes
from infinity.cli.stopping import deferred

app = typer.Typer(
    help="Measure drives, memory, links and optimizer kernels.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(epilog=EPILOG)
@takes(TierArguments)
def tier(arguments: TierArguments) -> None:
    """Measure drives through the same code that training uses, and memory, links and optimizer kernels.

    \b
    infinity bench tier                                  the default directory, less than a minute
    infinity bench tier /mnt/nvme0 /mnt/nvme1            each alone, and both together
    infinity bench tier /mnt/nvme0 --compare-fio --json result.json
    infinity bench tier /mnt/nvme0 --engines direct,buffered,aiofiles --profile seq1m
    infinity bench tier /mnt/nvme0 --sustained 200GiB --html drive.html
    """
    with deferred():
        from infinity.cli.bench_tier import run

    run(arguments)


@app.command(epilog=EPILOG)
@takes(CalibrateOptions)
def calibrate(options: CalibrateOptions) -> None:
    """Find the block size and number of threads that suit each drive; later runs on it use them.

    Takes a second or two per drive. What is found is kept in the user's cache folder for 90 days, by drive. A run with
    nvme.threads or nvme.block_nbytes set, or with nvme.calibrate = "off", does not look at it.

    \b
    infinity bench calibrate /mnt/nvme0 /mnt/nvme1
    """
    with deferred():
        from infinity.cli.bench_calibrate import run

    run(options.paths, options.json)


@app.command(epilog=EPILOG)
@takes(StepOptions)
def step(options: StepOptions) -> None:
    """Measure one training step against its bound: what its slowest resource needs by itself.

    Steps and resources take turns: the engine's step, the drives with the step's bytes, the plain model in memory, the
    optimizer's kernel. What a step takes beyond the bound is accounted for by cause.

    \b
    infinity bench step --preset small --nvme /mnt/nvme0
    infinity bench step --layers 24 --hidden 1024 --accumulate 4 --rounds 3 --json step.json
    """
    with deferred():
        from infinity.cli.bench_step import run

    run(options)
