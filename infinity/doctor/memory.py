"""Checks of memory: what there is, what the process may use of it, how much may be locked."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import psutil

from infinity.doctor.check import Check, Status
from infinity.sizes import GIB, MIB, format_nbytes

_CGROUP_OF_SELF = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT_NBYTES = 1 << 60  # cgroup v1 says "none" with a huge number
_LITTLE_NBYTES = 2 * GIB
_LITTLE_LOCKED_NBYTES = 64 * MIB


def cgroup_limit(of_self: Path = _CGROUP_OF_SELF, root: Path = _CGROUPS) -> tuple[int, Path] | None:
    """The smallest memory limit above this process, version 1 or 2, and the file that says so; None without one."""
    limits = []
    for file in _limit_files(of_self, root):
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _NO_LIMIT_NBYTES:
            limits.append((int(text), file))
    return min(limits, default=None)


def _limit_files(of_self: Path, root: Path) -> list[Path]:
    try:
        lines = of_self.read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files += _upwards(root, path, "memory.max")
            files += _upwards(root / "unified", path, "memory.max")
        elif "memory" in controllers.split(","):
            files += _upwards(root / "memory", path, "memory.limit_in_bytes")
    return files


def _upwards(root: Path, path: str, name: str) -> list[Path]:
    """The file in a group and in those above it. Inside a container the path may not exist, but the root does."""
    group = root / path.lstrip("/")
    return [place / name for place in (group, *group.parents) if place == root or root in place.parents]


def check_memory() -> Check:
    """What is available, and whether a limit is lower than that."""
    available_nbytes = psutil.virtual_memory().available
    limit = cgroup_limit()
    data: dict[str, Any] = {"available": available_nbytes, "limit": limit[0] if limit else None}
    found = f"{format_nbytes(available_nbytes)} available"
    fix = ""
    usable_nbytes = available_nbytes
    status = Status.OK
    if limit is not None:
        limit_nbytes, file = limit
        data["limit_file"] = str(file)
        found += f", but this process may use {format_nbytes(limit_nbytes)} ({file})"
        usable_nbytes = min(available_nbytes, limit_nbytes)
        if limit_nbytes < available_nbytes:
            status = Status.WARNING
            fix = f"infinity train --host-budget {usable_nbytes // 2 // MIB}MiB    # well below the limit"
        else:
            found = f"{format_nbytes(available_nbytes)} available, limit {format_nbytes(limit_nbytes)} ({file})"
    if usable_nbytes < _LITTLE_NBYTES:
        status, fix = Status.WARNING, fix or "infinity train --preset tiny    # or end other programs"
    return Check("memory", status, found, fix, data=data)


def check_memlock(*, has_cuda: bool) -> Check:
    """How much memory may be locked; only pinning for a GPU wants much."""
    limit_nbytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_unlimited = limit_nbytes == resource.RLIM_INFINITY
    found = "unlimited" if is_unlimited else format_nbytes(limit_nbytes)
    data = {"limit": None if is_unlimited else limit_nbytes}
    if is_unlimited or limit_nbytes >= _LITTLE_LOCKED_NBYTES:
        return Check("memlock", Status.OK, found, data=data)
    if not has_cuda:
        return Check("memlock", Status.OK, f"{found}; nothing is pinned without a GPU", data=data)
    fix = "ulimit -l unlimited    # to keep it: '* - memlock unlimited' in /etc/security/limits.conf"
    return Check("memlock", Status.WARNING, f"{found}: pinning host memory may be refused", fix, data=data)
