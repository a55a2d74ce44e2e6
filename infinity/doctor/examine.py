"""All checks in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from infinity.doctor.check import Check, Status
from infinity.doctor.directories import check_directory
from infinity.doctor.memory import check_memlock, check_memory
from infinity.doctor.software import (
    check_cuda,
    check_gds,
    check_numba_cache,
    check_processor,
    check_system,
    check_temporary_directory,
    check_torch,
)


def examine(directories: Sequence[Path]) -> list[Check]:
    """The machine, then each directory."""
    torch = check_torch()
    has_torch = torch.status is not Status.FAILURE
    gpu = check_cuda() if has_torch else None
    machine: list[Callable[[], Check]] = [
        check_system,
        check_memory,
        lambda: check_memlock(has_cuda=gpu is not None and gpu.status is Status.OK),
        check_temporary_directory,
        check_numba_cache,
    ]
    if has_torch:
        machine += [check_processor, check_gds]
    checks = [torch, *([gpu] if gpu is not None else []), *(check() for check in machine)]
    for directory in directories:
        checks += check_directory(directory)
    return checks
