"""Running the plain baseline and comparing it with the offloaded run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from infinity.cli.memory import activation_nbytes
from infinity.cli.records import PlainRun
from infinity.cli.settings import Training
from infinity.config import Precision
from infinity.errors import ConfigError, InfinityError
from infinity.sizes import format_nbytes

_BYTES_PER_PARAMETER = 16  # parameter, gradient and two moments in fp32
_BASE_NBYTES = 300 << 20  # interpreter and libraries
_SHOWN_LINES = 12


class BaselineError(InfinityError):
    """The plain run did not come to its end."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The plain run beside the offloaded one. What is None was not compared: no equality is promised there."""

    plain: PlainRun
    losses_equal: bool | None
    parameters_equal: bool | None
    different: tuple[str, ...]
    reason: str


def check_memory(training: Training) -> None:
    """Refuse a baseline that this machine's memory cannot hold, before anything runs.

    Raises:
        ConfigError: with the arithmetic.
    """
    state = training.shape.parameters * _BYTES_PER_PARAMETER
    need = state + activation_nbytes(training) + _BASE_NBYTES
    have = int(psutil.virtual_memory().available)
    if need > have:
        raise ConfigError(
            f"--baseline: plain PyTorch needs about {format_nbytes(need)} for this model ({format_nbytes(state)} of "
            f"parameters, gradients and moments), but {format_nbytes(have)} are available here. Leave --baseline out, "
            "or take a smaller model"
        )


def run_baseline(training: Training) -> PlainRun:
    """Train in plain PyTorch in a process of its own.

    Raises:
        BaselineError: it failed; the end of what it wrote is in the message.
    """
    spec = json.dumps({"training": asdict(training), "threads": torch.get_num_threads(), "parent": os.getpid()})
    # -P: modules in the folder the user works in must not shadow the library's.
    command = [sys.executable, "-P", "-m", "infinity.cli.plain_run"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=_environment())
    try:
        result, said = process.communicate(spec)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    if process.returncode != 0:
        end = "\n".join(said.splitlines()[-_SHOWN_LINES:])
        how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
        raise BaselineError(f"the plain PyTorch run ended with {how}:\n{end}")
    return PlainRun(**json.loads(result))


def _environment() -> dict[str, str]:
    """This process's environment, in which the same packages are found, installed or not."""
    root = str(Path(__file__).resolve().parents[2])
    before = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": root if before is None else f"{root}{os.pathsep}{before}"}


def compare(
    plain: PlainRun, losses: Sequence[float], hashes: dict[str, str], precision: Precision, training: Training
) -> Comparison:
    """Compare the last `len(losses)` steps and the final parameters, bit for bit, where the same bits are promised."""
    if training.micro_batches > 1:
        reason = (
            "not compared with --micro-batches: what lies outside of all units, such as the sum over the batch for the "
            "positions, sees the whole batch, plain PyTorch here adds slices up; --micro-batches 1 gives the same bits"
        )
        return Comparison(plain, None, None, (), reason)
    losses_equal = plain.losses[len(plain.losses) - len(losses) :] == list(losses)
    different = tuple(name for name in plain.hashes if plain.hashes[name] != hashes.get(name))
    if precision is Precision.BF16:
        reason = (
            "not compared in bf16: the offloaded run computes from bf16 roundings of its fp32 master, plain PyTorch "
            "here trains in fp32. --precision fp32 gives the same bits"
        )
        return Comparison(plain, losses_equal, None, (), reason)
    reason = "bit for bit, by a hash of every parameter"
    if training.uses_cuda:
        reason += "; plain PyTorch updates on the GPU, infinity on the CPU, which may round differently"
    return Comparison(plain, losses_equal, not different, different, reason)
