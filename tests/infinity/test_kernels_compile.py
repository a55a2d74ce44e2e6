"""Compiling the one-pass kernel: cached on disk where possible, working where not, off the GIL."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infinity.optim import onepass
from infinity.optim.kernels_bf16 import SplitMasterAdamW
from infinity.torch_compat import fused_adamw_

NUMEL = 100
SCRIPT = """
import json, logging, sys
import numpy as np
import onepass
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
function = onepass.compiled_update("fp32")
arrays = [np.full(100, 0x3F80, np.uint16), np.zeros(100, np.int16), np.ones(100, np.float32)]
arrays += [np.zeros(100, np.float32), np.zeros(100, np.float32)]
coefficients = np.array([[1, 1, 0.1, 0, 0.999, 0.001, 0.03, 1e-8, -0.001]], np.float32)
function(*arrays, np.array([[0, 100]], np.int64), coefficients)
loaded = sum(function.stats.cache_hits.values())
json.dump({"halves": [int(arrays[0][0]), int(arrays[1][99])], "loaded": loaded}, sys.stdout)
"""


def operands(numel: int) -> tuple[np.ndarray[Any, Any], ...]:
    hi, lo = np.full(numel, 0x3F80, np.uint16), np.zeros(numel, np.int16)
    grad, exp_avg, exp_avg_sq = np.ones(numel, np.float32), np.zeros(numel, np.float32), np.zeros(numel, np.float32)
    bounds = np.array([[0, numel]], np.int64)
    coefficients = np.array([[1, 1, 0.1, 0, 0.999, 0.001, 0.03, 1e-8, -0.001]], np.float32)
    return hi, lo, grad, exp_avg, exp_avg_sq, bounds, coefficients


def start(folder: Path, **environment: str) -> tuple[dict[str, Any], str]:
    """Runs a fresh process on a private copy of the module; what it computed, and what it logged."""
    if not (folder / "onepass.py").exists():
        shutil.copy(onepass.__file__, folder / "onepass.py")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def halves() -> list[int]:
    arrays = operands(NUMEL)
    onepass.compiled_update("fp32")(*arrays)
    return [int(arrays[0][0]), int(arrays[1][NUMEL - 1])]


def test_compiled_once_then_loaded_and_a_damaged_cache_is_survived(tmp_path: Path, halves: list[int]) -> None:
    cache = tmp_path / "cache"
    first, log = start(tmp_path, NUMBA_CACHE_DIR=str(cache))
    assert (first, log) == ({"halves": halves, "loaded": 0}, "")
    kept = list(cache.rglob("*.nb[ci]"))
    assert len(kept) == 2
    second, log = start(tmp_path, NUMBA_CACHE_DIR=str(cache))
    assert (second, log) == ({"halves": halves, "loaded": 1}, "")
    for path in kept:
        path.write_bytes(path.read_bytes()[:40])
    third, _ = start(tmp_path, NUMBA_CACHE_DIR=str(cache))
    assert third["halves"] == halves


def test_without_a_writable_cache_it_compiles_for_the_process_and_says_so(tmp_path: Path, halves: list[int]) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a directory is wanted: root cannot write below it either")
    (tmp_path / "__pycache__").write_text("the same")
    below = str(blocked / "below")
    result, log = start(tmp_path, NUMBA_CACHE_DIR=str(blocked), XDG_CACHE_HOME=below, HOME=below)
    assert result["halves"] == halves
    assert log.count("WARNING") == 1
    assert "NUMBA_CACHE_DIR" in log


def test_an_unwritable_numba_cache_dir_alone_falls_back_to_another_place(tmp_path: Path, halves: list[int]) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a directory is wanted")
    result, log = start(tmp_path, NUMBA_CACHE_DIR=str(blocked))
    assert (result["halves"], log) == (halves, "")
    assert list((tmp_path / "__pycache__").glob("*.nbc"))


def test_warm_up_compiles_once_per_process() -> None:
    onepass.compiled_update.cache_clear()  # of what other tests have compiled in this process
    SplitMasterAdamW().warm_up()
    misses = onepass.compiled_update.cache_info().misses
    SplitMasterAdamW().warm_up()
    assert onepass.compiled_update.cache_info().misses == misses == 1


def one_pass_call() -> Callable[[], None]:
    function, arrays = onepass.compiled_update("fp32"), operands(1 << 16)
    return lambda: function(*arrays)


def fused_call() -> Callable[[], None]:
    tensors = [[torch.zeros(1 << 16)] for _ in range(4)]
    steps = [torch.tensor(1.0)]
    hyper = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    return lambda: fused_adamw_(*tensors, steps, maximize=False, **hyper)


@pytest.mark.parametrize("build", [one_pass_call, fused_call])
def test_the_gil_is_free_while_a_kernel_runs(build: Callable[[], Callable[[], None]]) -> None:
    """With thread switching put off, this thread runs again only if the kernel lets go of the GIL by itself."""
    kernel, most = build(), 20_000
    stop = threading.Event()
    rounds = 0

    def work() -> None:
        nonlocal rounds
        while rounds < most and (rounds == 0 or not stop.is_set()):
            kernel()
            rounds += 1

    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    worker = threading.Thread(target=work, name="kernel-under-test")
    try:
        worker.start()
        stop.set()
        worker.join(timeout=200)
    finally:
        sys.setswitchinterval(before)
    assert not worker.is_alive()
    assert 0 < rounds < most
