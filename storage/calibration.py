"""A short measurement of a drive: which block size, how many threads and which engine make it as fast as it can be.

A file of a modest size is written in the directory, a few settings move blocks of it with O_DIRECT, reads and writes
mixed and hashed as in training, and the cheapest setting that is about as fast as the fastest is chosen. Then the
kernel's asynchronous transfers take turns with the threads. It takes a second or two on a fast drive, writes at most
`MOST_WRITTEN_NBYTES`, leaves room on the disk, and its file is gone afterwards.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from storage.backends.kernel_aio import why_not
from storage.backends.probe import Engine, choose_engine, make_backend
from storage.devices import identify_device
from storage.errors import IoTimeoutError, StorageError, SwapFullError
from storage.pool import HostPool
from storage.swapfile import RunFolder, SwapFile, make_directory_error
from storage.types import IoRequest, Op, Priority, Ticket

PROCEDURE = 2  # raised when the measurement changes, so that older results are not compared with newer ones

_MIB = 1 << 20
_FILE_NBYTES = 256 * _MIB
_LEAST_FILE_NBYTES = 64 * _MIB  # two batches, which must not overlap
_TRANSFER_NBYTES = 8 * _MIB
_BATCH_NBYTES = 32 * _MIB
_TRIAL_NBYTES = 192 * _MIB
_TRIAL_S = 0.12
_FILL_S = 0.5
_MOST_S = 4.0  # a slow drive is not asked about every setting
_ROUNDS = 2
_GOOD_ENOUGH = 0.95  # of the fastest: what more brings beyond that is noise, and costs memory and latency
_TIMEOUT_S = 60.0
_ENGINES = (Engine.DIRECT, Engine.AIO)
_SETTINGS = ((_MIB, 4), (_MIB, 8), (_MIB, 16), (4 * _MIB, 2), (4 * _MIB, 4), (4 * _MIB, 8))

MOST_WRITTEN_NBYTES = _FILE_NBYTES + _TRIAL_NBYTES + _ROUNDS * (len(_SETTINGS) + len(_ENGINES)) * _TRIAL_NBYTES // 2


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting and how fast it was: bytes per second read and written together, half of them each."""

    block_nbytes: int
    threads: int
    nbytes_per_s: float

    @property
    def in_flight_nbytes(self) -> int:
        """Bytes of the blocks that are in flight at a time."""
        return self.block_nbytes * self.threads

    @property
    def name(self) -> str:
        return f"{self.block_nbytes // _MIB} MiB × {self.threads} threads"


@dataclass(frozen=True, slots=True)
class EngineTrial:
    """What moved the bytes, how fast, and the CPU time of this process for a GB of them."""

    engine: Engine
    nbytes_per_s: float
    cpu_s_per_gb: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured of a drive, and what follows.

    Attributes:
        device: see `identify_device`.
        engine: what moved the bytes of the settings.
        block_nbytes, threads: the setting to use.
        read_nbytes_per_s, write_nbytes_per_s: with it, reading only and writing only.
        reason: the same for people, and what was not chosen.
        measured_s: when, in seconds since 1970.
        procedure: version of the measurement.
        best_engine: what "auto" takes on this drive.
    """

    device: str
    engine: str
    block_nbytes: int
    threads: int
    read_nbytes_per_s: float
    write_nbytes_per_s: float
    reason: str
    measured_s: float
    procedure: int = PROCEDURE
    best_engine: str = Engine.DIRECT.value


def calibrate(directory: Path) -> Calibration:
    """Measure the drive that holds a directory.

    Raises:
        SwapFullError: too little room for the file.
        StorageError: the directory cannot be written to, has no direct I/O, or the drive failed. The page cache is not
            measured: how fast it is says nothing about the drive.
    """
    with ExitStack() as closing:
        try:
            folder = RunFolder(directory, "calibration")
        except OSError as error:
            raise make_directory_error(directory, error) from error
        closing.callback(folder.remove)
        engine, reason = choose_engine(folder.path, Engine.AUTO)
        if engine is not Engine.DIRECT:
            raise StorageError(f"{directory} cannot be calibrated: {reason}, so transfers go through the page cache")
        nbytes = _choose_nbytes(directory)
        file = SwapFile(folder.path / "calibration.data", nbytes, direct=True, free_margin_nbytes=0)
        closing.callback(file.close)
        pool = HostPool(2 * _BATCH_NBYTES)
        closing.callback(pool.close)
        lease = closing.enter_context(pool.lease(2 * _BATCH_NBYTES, "calibration"))
        random = np.random.default_rng(0)  # content that a drive cannot compress; also faults the memory in
        lease.array("u8")[:] = random.integers(0, 1 << 64, len(lease.memory) // 8, dtype=np.uint64)
        return _Drive(directory, file, lease.memory).calibrate(nbytes)


def _choose_nbytes(directory: Path) -> int:
    usage = shutil.disk_usage(directory)
    margin_nbytes = min(max(usage.total // 20, _FILE_NBYTES), 8 * _FILE_NBYTES)
    room_nbytes = (usage.free - margin_nbytes) // _BATCH_NBYTES * _BATCH_NBYTES
    if room_nbytes < _LEAST_FILE_NBYTES:
        raise SwapFullError(
            f"calibrating {directory} needs {_LEAST_FILE_NBYTES} bytes and a margin of {margin_nbytes}, but only "
            f"{usage.free} bytes are free there. Free space or choose another directory",
            path=str(directory),
        )
    return min(room_nbytes, _FILE_NBYTES)


class _Drive:
    """Runs loads on one file. `memory` holds two batches of transfers."""

    def __init__(self, directory: Path, file: SwapFile, memory: memoryview) -> None:
        self._directory = directory
        self._file = file
        self._parts = [memory[start : start + _TRANSFER_NBYTES] for start in range(0, len(memory), _TRANSFER_NBYTES)]
        self._nbytes = 0

    def calibrate(self, file_nbytes: int) -> Calibration:
        device = identify_device(self._directory)
        # Blocks that were only reserved are slow to write and quick to read.
        self._nbytes = file_nbytes
        _, filled_nbytes = self._run(4 * _MIB, 4, (Op.WRITE,), seconds=_FILL_S, most_nbytes=file_nbytes)
        self._nbytes = max(filled_nbytes, _LEAST_FILE_NBYTES)
        trials = self._try_settings()
        chosen = choose(trials)
        read = self._rate(chosen.block_nbytes, chosen.threads, (Op.READ,))
        write = self._rate(chosen.block_nbytes, chosen.threads, (Op.WRITE,))
        engines = self._try_engines(chosen)
        best = choose_by_cost(engines)
        return Calibration(
            device,
            Engine.DIRECT.value,
            chosen.block_nbytes,
            chosen.threads,
            read,
            write,
            f"{explain(chosen, trials, read, write)}; {explain_engine(best, engines)}",
            time.time(),
            best_engine=best.engine.value,
        )

    def _try_settings(self) -> list[Trial]:
        """The better of the rounds of every setting; at least one round of the first two."""
        best: dict[tuple[int, int], float] = {}
        began_s = time.perf_counter()
        for _ in range(_ROUNDS):
            for setting in _SETTINGS:
                if len(best) >= 2 and time.perf_counter() - began_s > _MOST_S:
                    break
                best[setting] = max(best.get(setting, 0.0), self._rate(*setting, (Op.READ, Op.WRITE)))
        return [Trial(block, threads, rate) for (block, threads), rate in best.items()]

    def _try_engines(self, setting: Trial) -> list[EngineTrial]:
        """The engines that the kernel serves, in turns, as many bytes in flight: the better of the rounds of each."""
        engines = _ENGINES if why_not() is None else (Engine.DIRECT,)
        rounds: dict[Engine, list[EngineTrial]] = {}
        for _ in range(_ROUNDS):
            for engine in engines:
                cpu_s = time.process_time()
                elapsed_s, nbytes = self._run(
                    setting.block_nbytes,
                    setting.threads,
                    (Op.READ, Op.WRITE),
                    seconds=_TRIAL_S,
                    most_nbytes=_TRIAL_NBYTES,
                    engine=engine,
                )
                cost = (time.process_time() - cpu_s) / nbytes * 1e9
                rounds.setdefault(engine, []).append(EngineTrial(engine, nbytes / elapsed_s, cost))
        return [max(trials, key=lambda trial: trial.nbytes_per_s) for trials in rounds.values()]

    def _rate(self, block_nbytes: int, threads: int, ops: Sequence[Op]) -> float:
        elapsed_s, nbytes = self._run(block_nbytes, threads, ops, seconds=_TRIAL_S, most_nbytes=_TRIAL_NBYTES)
        return nbytes / elapsed_s

    def _run(
        self,
        block_nbytes: int,
        threads: int,
        ops: Sequence[Op],
        *,
        seconds: float,
        most_nbytes: int,
        engine: Engine = Engine.DIRECT,
    ) -> tuple[float, int]:
        """Batches, two of them in flight, until the time or the bytes are over; seconds taken and bytes moved."""
        backend = make_backend(engine, threads=threads, block_nbytes=block_nbytes)
        tickets: list[Ticket] = []
        began_s = time.perf_counter()
        try:
            while len(tickets) * _BATCH_NBYTES < most_nbytes:
                requests = self._batch(len(tickets), ops)
                tickets.append(Ticket.all_of([request.ticket for request in requests]))
                for request in requests:
                    backend.submit(request)
                if len(tickets) > 1:
                    self._wait(tickets[-2])
                if time.perf_counter() - began_s > seconds and len(tickets) > 1:
                    break
            self._wait(tickets[-1])
            return time.perf_counter() - began_s, len(tickets) * _BATCH_NBYTES
        finally:
            backend.close()

    def _batch(self, number: int, ops: Sequence[Op]) -> list[IoRequest]:
        """A batch whose operations alternate, each in a region of its own, where it goes on batch by batch."""
        count = _BATCH_NBYTES // _TRANSFER_NBYTES
        region_nbytes = self._nbytes // len(ops)
        requests = []
        for place in range(count):
            which = place % len(ops)
            walked_nbytes = (number * count + place) // len(ops) * _TRANSFER_NBYTES
            memory = self._parts[number % 2 * count + place]
            requests.append(
                IoRequest(
                    op=ops[which],
                    fd=self._file.fd,
                    path=str(self._file.path),
                    offset=which * region_nbytes + walked_nbytes % region_nbytes,
                    memory=memory,
                    priority=Priority.WRITE,  # the same for both, so that neither overtakes the other
                    key="calibration",
                    check=partial(_hash, memory),  # training hashes what it moves, on the engine's threads
                )
            )
        return requests

    def _wait(self, ticket: Ticket) -> None:
        if not ticket.wait(_TIMEOUT_S):
            raise IoTimeoutError(
                f"the drive of {self._directory} did not answer within {_TIMEOUT_S:.0f} s. See the kernel log (dmesg)",
                path=os.fspath(self._file.path),
            )
        ticket.result()


def _hash(memory: memoryview, start: int, stop: int) -> None:
    xxhash.xxh3_64_intdigest(memory[start:stop])


def choose(trials: Sequence[Trial]) -> Trial:
    """The setting with the fewest bytes in flight, then the fewest threads, of those about as fast as the fastest."""
    enough = _GOOD_ENOUGH * max(trial.nbytes_per_s for trial in trials)
    good = [trial for trial in trials if trial.nbytes_per_s >= enough]
    return min(good, key=lambda trial: (trial.in_flight_nbytes, trial.threads))


def explain(chosen: Trial, trials: Sequence[Trial], read_nbytes_per_s: float, write_nbytes_per_s: float) -> str:
    """One line: the choice, how fast it is, and what the best of the others would add."""
    rates = f"{read_nbytes_per_s / 1e9:.2f} GB/s read, {write_nbytes_per_s / 1e9:.2f} GB/s write"
    others = [trial for trial in trials if trial is not chosen]
    if not others:
        return f"{chosen.name}: {rates}"
    best = max(others, key=lambda trial: trial.nbytes_per_s)
    return f"{chosen.name}: {rates}; {best.name} gave {best.nbytes_per_s / chosen.nbytes_per_s - 1:+.0%}"


def choose_by_cost(trials: Sequence[EngineTrial]) -> EngineTrial:
    """The engine with the least CPU time of those about as fast as the fastest: training computes meanwhile."""
    enough = _GOOD_ENOUGH * max(trial.nbytes_per_s for trial in trials)
    return min((trial for trial in trials if trial.nbytes_per_s >= enough), key=lambda trial: trial.cpu_s_per_gb)


def explain_engine(chosen: EngineTrial, trials: Sequence[EngineTrial]) -> str:
    """The choice of an engine in a few words, beside what was not chosen."""
    texts = [f"{t.engine.value} {t.nbytes_per_s / 1e9:.2f} GB/s at {t.cpu_s_per_gb:.3f} CPU s/GB" for t in trials]
    return f"engine {chosen.engine.value} ({', '.join(texts)})"
