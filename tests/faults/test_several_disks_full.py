"""Full disks among several: real file systems of a few megabytes, mounted in a namespace of a process's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_WAIT_S = 100.0
_PROGRAM = Path(__file__).with_name("several_disks.py")


def _in_namespace(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["unshare", "--mount", "--user", "--map-root-user", *command],
        capture_output=True,
        text=True,
        timeout=_WAIT_S,
        check=False,
        cwd=Path(__file__).parents[2],
    )


@pytest.fixture(scope="module")
def can_mount(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("probe")
    try:
        found = _in_namespace("mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder))
    except OSError as error:
        pytest.skip(f"no unshare here: {error}")
    if found.returncode:
        pytest.skip(f"file systems cannot be mounted here: {found.stderr.strip()}")


@pytest.mark.usefixtures("can_mount")
@pytest.mark.parametrize(
    "case",
    ["opening", "opening_completely_full", "growing", "nowhere", "versioned", "versioned_completely_full"],
)
def test_full_disks(tmp_path: Path, case: str) -> None:
    ended = _in_namespace(sys.executable, "-m", "tests.faults.several_disks", case, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == f"{case} done"
