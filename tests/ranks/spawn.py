"""Runs a function on several ranks: real processes, each with torchrun's environment, and a store on a free port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parent.parent.parent
_TIMEOUT_S = 200.0


@dataclass(frozen=True)
class Result:
    """What became of one rank."""

    code: int
    output: str
    value: Any = None


def run_ranks(
    function: Callable[..., Any], size: int, folder: Path, *arguments: Any, check: bool = True
) -> list[Result]:
    """Call `function(folder, *arguments)` on every rank. It has to be importable; what it returns is pickled.

    Args:
        check: fail with the output of the first rank that failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(arguments, folder / "arguments.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [_start(function, rank, size, port, folder) for rank in range(size)]
    try:
        outputs = [process.communicate(timeout=_TIMEOUT_S)[0].decode() for process in processes]
    except subprocess.TimeoutExpired as error:
        for process in processes:
            process.kill()
        outputs = [process.communicate()[0].decode() for process in processes]
        raise AssertionError("the ranks hang; their output:\n" + "\n---\n".join(outputs)) from error
    results = []
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        place = folder / f"result{rank}.pt"
        value = torch.load(place, weights_only=False) if place.exists() else None
        results.append(Result(process.returncode, output, value))
    if check:
        assert all(result.code == 0 for result in results), "\n---\n".join(r.output for r in results)
    return results


def values(results: Sequence[Result]) -> list[Any]:
    return [result.value for result in results]


def _start(function: Callable[..., Any], rank: int, size: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tests.ranks.spawn", function.__module__, function.__qualname__, str(folder)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def _main(module: str, name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    function = getattr(import_module(module), name)
    arguments = torch.load(folder / "arguments.pt", weights_only=False)
    value = function(folder, *arguments)
    place = folder / f"result{os.environ['RANK']}.pt"
    torch.save(value, place.with_suffix(".part"))
    place.with_suffix(".part").rename(place)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        _main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        raise
