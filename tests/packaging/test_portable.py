"""Systems without Linux's calls (macOS): everything can be imported, and training works with the buffered backend."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import infinity

pytestmark = pytest.mark.slow  # each starts a process that loads torch

ROOT = Path(infinity.__file__).parent.parent
# What `os` and `mmap` of Python on macOS do not have.
REMOVE = """
import mmap, os, sys
for name in '''O_DIRECT posix_fallocate posix_fadvise POSIX_FADV_DONTNEED sched_getaffinity sched_setaffinity
        copy_file_range eventfd memfd_create O_TMPFILE fdatasync preadv pwritev getrandom'''.split():
    if hasattr(os, name):
        delattr(os, name)
for name in ("MADV_HUGEPAGE", "MADV_DONTFORK", "MADV_DONTDUMP", "MADV_POPULATE_WRITE"):
    if hasattr(mmap, name):
        delattr(mmap, name)
"""
IMPORT_ALL = """
import importlib, pkgutil
for package in ("storage", "infinity"):
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
print("imported")
"""
TRAIN = """
from infinity.cli.main import main
sys.argv = ["infinity", *sys.argv[1:]]
main()
"""


def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", REMOVE + program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, check=False)


def test_every_module_can_be_imported() -> None:
    done = run(IMPORT_ALL)
    assert (done.returncode, done.stdout) == (0, "imported\n"), done.stderr


def test_training_uses_the_buffered_backend_and_gives_the_same_numbers(tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    arguments = [
        "train",
        "--preset",
        "tiny",
        "--layers",
        "2",
        "--steps",
        "2",
        "--precision",
        "fp32",
        "--device",
        "cpu",
        "--baseline",
    ]
    done = run(TRAIN, *arguments, "--nvme", swap, "--json", tmp_path / "run.json", "--save", tmp_path / "saved")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run.json").read_text())
    assert report["io_engine"].startswith("buffered")
    assert report["baseline"]["losses"] == report["losses"]
    assert report["baseline"]["parameters_equal"]
    assert (tmp_path / "saved").is_dir()
    assert list(swap.iterdir()) == []
