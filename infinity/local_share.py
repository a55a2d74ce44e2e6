"""What one process takes of its machine, whose memory and drives the processes of a job share."""

from __future__ import annotations

import os

import psutil
import torch.distributed as dist

from infinity.config import Config

_HOST_SHARE = 2  # a budget that is not given is this fraction of what is available


def told_local_size() -> int | None:
    """Processes of this job on this machine, as torchrun says it; None where nobody says."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    is_job = dist.is_available() and dist.is_initialized()
    return int(told) if is_job and told.isdecimal() and int(told) else None


def host_budget_nbytes(config: Config, local_size: int) -> int:
    """Host memory of one of so many processes: of what is given for the machine, or of what is available now."""
    if config.host.budget is not None:
        return config.host.budget // local_size
    return int(psutil.virtual_memory().available) // _HOST_SHARE // local_size
