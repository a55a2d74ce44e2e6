"""Running a command under a memory limit: a memory cgroup where one may be made, RLIMIT_DATA where not."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limited:
    """How a command ended, under which kind of limit, and the most memory its cgroup charged (None with RLIMIT)."""

    result: subprocess.CompletedProcess[str]
    kind: str
    peak_nbytes: int | None


@contextmanager
def _cgroup(limit_nbytes: int) -> Iterator[tuple[Path, str] | None]:
    """A fresh memory cgroup with the limit set, or None when this process may not make one."""
    name = f"infinity-test-{uuid.uuid4().hex[:8]}"
    for root, limit_file, peak_file in (
        (_V1, "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
        (_V2, "memory.max", "memory.peak"),
    ):
        group = root / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            try:
                (group / limit_file).write_text(str(limit_nbytes))
            except OSError:
                continue
            yield group, peak_file
            return
        finally:
            group.rmdir()
    yield None


def run_limited(command: Sequence[str], limit_nbytes: int, *, timeout_s: float, cwd: Path) -> Limited:
    """Run a command to its end under a memory limit."""
    with _cgroup(limit_nbytes) as made:
        if made is None:
            result = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                cwd=cwd,
                check=False,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit_nbytes, limit_nbytes)),
            )
            return Limited(result, "RLIMIT_DATA", None)
        group, peak_file = made
        enter = f"import os,sys; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid())); "
        script = enter + "os.execv(sys.argv[1], sys.argv[1:])"
        result = subprocess.run(
            [sys.executable, "-c", script, *command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=cwd,
            check=False,
            env=os.environ,
        )
        peak = int((group / peak_file).read_text()) if (group / peak_file).exists() else None
        return Limited(result, "memory cgroup", peak)
