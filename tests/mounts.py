"""File systems made in files and mounted, for tests of what differs among them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

MakeFileSystem = Callable[..., Path]
_LEAST_NBYTES = 320 << 20  # what mkfs.xfs asks for


@contextmanager
def mounting(folder: Path) -> Iterator[MakeFileSystem]:
    """Gives a function that makes a file system in `folder` and mounts it there; at the end all of them are gone.

    It skips the test where that needs more than this process may do or has.
    """
    with ExitStack() as undo:

        def make(kind: str, *, sector_nbytes: int = 512, options: str = "") -> Path:
            if os.geteuid() != 0:
                pytest.skip("mounting needs root")
            for tool in (f"mkfs.{kind}", "losetup", "mount"):
                if shutil.which(tool) is None:
                    pytest.skip(f"no {tool} here")
            image, point = folder / f"{kind}.img", folder / kind
            point.mkdir()
            with image.open("wb") as file:
                file.truncate(_LEAST_NBYTES)
            sector = ("--sector-size", str(sector_nbytes))
            device = run_tool("losetup", "--find", "--show", "--direct-io=on", *sector, image).strip()
            undo.callback(run_tool, "losetup", "--detach", device)
            run_tool(f"mkfs.{kind}", "-q", device)
            run_tool("mount", "-t", kind, *(("-o", options) if options else ()), device, point)
            undo.callback(_unmount, point)
            return point

        yield make


def run_tool(*command: object) -> str:
    """What a program prints; the test is skipped if it does not work here."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=200, check=False)
    if done.returncode:
        pytest.skip(f"{command[0]} does not work here: {done.stderr.strip()[:100]}")
    return done.stdout


def _unmount(point: Path) -> None:
    subprocess.run(["umount", str(point)], check=True, timeout=200)
