"""The plain run beside an offloaded one: it leaves nothing behind, whatever becomes of the command that started it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from infinity.cli.settings import Training, resolve
from infinity.cli.train_options import TrainOptions
from infinity.models.gpt import GptShape
from tests.cli.command import ROOT, TIMEOUT_S


def training(**changes: Any) -> Training:
    return replace(resolve(TrainOptions(preset="tiny")).training, **changes)


def test_it_ends_when_nobody_waits_for_it_any_more() -> None:
    spec = {"training": asdict(training(steps=100_000)), "threads": 1, "parent": os.getppid()}  # not this process
    done = subprocess.run(
        [sys.executable, "-m", "infinity.cli.plain_run"],
        input=json.dumps(spec),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (130, ""), done.stderr


_PLAIN = """
import json, sys, torch
from infinity.cli.plain_run import train_plain, training_from_json
threads = torch.get_num_threads()
run = train_plain(training_from_json(json.loads(sys.stdin.read())))
print(json.dumps([threads, run.hashes]))
"""


def test_it_has_the_bits_of_a_program_that_sets_no_threads() -> None:
    """Being asked for the threads that there are makes MKL add up in another order, on some processors."""

    def result(*command: str, given: object) -> Any:
        done = subprocess.run(
            [sys.executable, *command],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "2"},
            timeout=TIMEOUT_S,
            check=True,
        )
        return json.loads(done.stdout)

    shape = GptShape(layers=1, hidden=1024, heads=8, seq=128)
    mine = asdict(training(shape=shape, batch=8, steps=1))
    threads, hashes = result("-c", _PLAIN, given=mine)
    child = result("-m", "infinity.cli.plain_run", given={"training": mine, "threads": threads, "parent": os.getpid()})
    assert child["hashes"] == hashes


_STARTS = """
import sys
from infinity.cli.baseline import run_baseline
from tests.cli.test_baseline import training
run_baseline(training(steps=100_000))
"""


@pytest.mark.slow
def test_a_killed_command_leaves_neither_a_process_nor_a_file(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", _STARTS], cwd=ROOT, env=environment) as command:
        me = psutil.Process(command.pid)
        while not (children := me.children()):
            assert command.poll() is None
        command.kill()
    gone, alive = psutil.wait_procs(children, timeout=TIMEOUT_S)
    for one in alive:
        one.kill()
    assert (len(gone), alive) == (1, [])
    assert list(tmp_path.glob("infinity*")) == []
