"""What a command needs to know of a job of several ranks, from torchrun's environment."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """This process's place in the job; a process that torchrun did not start is a job of one."""

    rank: int = 0
    size: int = 1
    local_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes reports."""
        return self.rank == 0


def this_job() -> Job:
    """The job that the environment tells of; what is no number counts as not there, and `offload` refuses it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    rank, size, local_size = (os.environ.get(name, "") for name in names)
    if not (rank.isdecimal() and size.isdecimal()):
        return Job()
    return Job(int(rank), int(size), int(local_size) if local_size.isdecimal() else 1)
