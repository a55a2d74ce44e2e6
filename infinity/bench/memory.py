"""Host memory, the link to the device and the optimizer's kernels; each alone, and while a drive is busy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch
import xxhash

from infinity.bench.engines import BenchEngine
from infinity.bench.load import Load
from infinity.bench.profiles import BUSY
from infinity.bench.result import MemoryRate, MemoryReport
from infinity.bench.statistics import spread
from infinity.bench.target import Target
from infinity.bench.tier import Progress, ready
from infinity.config import Precision
from infinity.devices.select import describe_missing_cuda
from infinity.optim.hyper import AdamWHyper, Piece
from infinity.optim.kernel_threads import KernelThreads, usable_cores
from infinity.optim.kernels import kernel_for
from infinity.sizes import MIB
from storage.checksums import BLOCK_NBYTES
from storage.types import Op

_COPY_NBYTES = 256 * MIB  # larger than the caches of a processor
_LINK_NBYTES = 256 * MIB
_HASH_NBYTES = 64 * MIB
_KERNEL_NUMEL = 4 * 1024 * 1024
_HYPER = AdamWHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)

Pass = Callable[[], int]  # does a piece of work, and returns how much: bytes or parameters


def measure_memory(
    target: Target | None, *, repeats: int, seconds: float, progress: Progress
) -> tuple[MemoryReport, int]:
    """Measure each rate `repeats` times for `seconds`, and as often beside reads and writes on `target`.

    Returns:
        The rates, and how many bytes were written to the drive.
    """
    threads = usable_cores()
    rates = []
    written_nbytes = 0
    with ExitStack() as closing:
        for name, count, unit, work in _works(threads, closing):
            progress(name)
            work()  # compiles, faults memory in, starts threads
            alone, beside, moved_nbytes, busy_s = [], [], 0, 0.0
            for _ in range(repeats):  # in turns: what disturbs the machine for a while hits both
                alone.append(_rate(work, seconds))
                if target is None:
                    continue
                with busy(target) as load:
                    before_nbytes, started_s = load.total_nbytes, time.perf_counter()
                    beside.append(_rate(work, seconds))
                    moved_nbytes += load.total_nbytes - before_nbytes
                    busy_s += time.perf_counter() - started_s
                written_nbytes += load.moved_nbytes(Op.WRITE)
            drive_rate = moved_nbytes / busy_s if busy_s else None
            rates.append(MemoryRate(name, count, unit, spread(alone), spread(beside) if beside else None, drive_rate))
    notes = () if torch.cuda.is_available() else (f"host to device: not measured, {describe_missing_cuda()}",)
    return MemoryReport(tuple(rates), notes), written_nbytes


def _rate(work: Pass, seconds: float) -> float:
    started_s = time.perf_counter()
    done = work()
    while (elapsed_s := time.perf_counter() - started_s) < seconds:
        done += work()
    return done / elapsed_s


@contextmanager
def busy(target: Target) -> Iterator[Load]:
    """Keep a drive busy with half reads, half writes."""
    engine = BenchEngine.DIRECT if target.direct_problem is None else BenchEngine.BUFFERED
    with ready(BUSY, engine, [target]) as runner:
        (load,) = runner.loads(seconds=float("inf"))
        load.start()
        try:
            yield load
        finally:
            load.stop()
            runner.wait([load], seconds=0.0)


def _works(threads: int, closing: ExitStack) -> Iterator[tuple[str, int, str, Pass]]:
    """Name, threads, unit and work; one after the other, so that the memory of one is free before the next."""
    for count in dict.fromkeys((1, threads)):
        yield "host memory copy", count, "bytes/s", _host_copy(count, closing)
    yield "xxh3 checksum", 1, "bytes/s", _hash()
    if torch.cuda.is_available():
        for name, to_device in (("host to device", True), ("device to host", False)):
            yield name, 1, "bytes/s", _link_copy(to_device=to_device)
    for precision in (Precision.FP32, Precision.BF16):
        for count in dict.fromkeys((1, threads)):
            yield f"AdamW {precision.value}", count, "parameters/s", _update(precision, count, closing)


def _host_copy(count: int, closing: ExitStack) -> Pass:
    pool = closing.enter_context(KernelThreads(count))
    source, target = np.ones(_COPY_NBYTES, np.uint8), np.ones(_COPY_NBYTES, np.uint8)
    parts = list(zip(np.array_split(target, count), np.array_split(source, count), strict=True))

    def work() -> int:
        pool.run([partial(np.copyto, to, of) for to, of in parts])
        return _COPY_NBYTES

    return work


def _hash() -> Pass:
    """What the checksums of stored blocks cost; they are computed in the threads that move the bytes."""
    memory = memoryview(bytes(_HASH_NBYTES))
    blocks = [memory[start : start + BLOCK_NBYTES] for start in range(0, _HASH_NBYTES, BLOCK_NBYTES)]

    def work() -> int:
        for block in blocks:
            xxhash.xxh3_64_intdigest(block)
        return _HASH_NBYTES

    return work


def _link_copy(*, to_device: bool) -> Pass:
    host = torch.ones(_LINK_NBYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.ones(_LINK_NBYTES, dtype=torch.uint8, device="cuda")
    source, target = (host, device) if to_device else (device, host)

    def work() -> int:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return _LINK_NBYTES

    return work


def _update(precision: Precision, count: int, closing: ExitStack) -> Pass:
    pool = closing.enter_context(KernelThreads(count))
    kernel = kernel_for(precision, pool)
    kernel.warm_up()
    param = torch.ones(_KERNEL_NUMEL, dtype=kernel.param_dtype)
    grad = torch.full((_KERNEL_NUMEL,), 1e-3)
    state = [torch.zeros(_KERNEL_NUMEL, dtype=field.dtype) for field in kernel.fields]
    pieces = [Piece(0, _KERNEL_NUMEL, 1, _HYPER)]

    def work() -> int:
        before = torch.get_num_threads()
        torch.set_num_threads(count)  # the fp32 kernel is torch's own
        try:
            kernel.update(param, grad, state, pieces, None)
        finally:
            torch.set_num_threads(before)
        return _KERNEL_NUMEL

    return work
