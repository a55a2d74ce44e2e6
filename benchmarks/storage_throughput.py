"""What the shard store reaches on a directory, beside plain O_DIRECT threads at the same block size and depth.

    python benchmarks/storage_throughput.py DIRECTORY [--block 4M --threads 4] [--sweep] [--json FILE]

Both sides transfer the same spans of a file of the same size, in turns, so that a drive that gets slower (or a
neighbour that gets louder) hits both. The store and the plain threads use O_DIRECT, which the page cache cannot serve.
The store runs with and without
checksums, and the rate of the checksum alone is measured on one core, since it is what a faster drive would meet.
A cache in the drive, or in the host of a virtual machine, is up to `--file`: make it larger than that cache. Figures
are medians over rounds, with the range.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from infinity.bench.arguments import at_least, duration_s, made_folder, result_file
from infinity.bench.machine import describe_machine
from storage.align import split_blocks
from storage.checksums import BLOCK_NBYTES, Checksum
from storage.drives import DEFAULT_BLOCK_NBYTES, DEFAULT_THREADS
from storage.filesystems import find_file_system
from storage.pool import HostPool
from storage.store import ShardStore, StorageOptions
from storage.types import Op, Priority, Ticket, TrafficTag

_TAG = TrafficTag("bench", 0)
_SHARD_NBYTES = 32 << 20  # one transfer of the store: the size of a large layer's shard
_TIMEOUT_S = 60.0
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SWEEP = [(1 << 20, 4), (4 << 20, 2), (4 << 20, 4), (4 << 20, 8), (8 << 20, 4)]


@dataclass(frozen=True, slots=True)
class Setting:
    """Bytes of one system call, and how many are at the drive at a time."""

    block_nbytes: int
    threads: int


@dataclass(frozen=True, slots=True)
class Figure:
    """Bytes per second of one side on one pattern: median, slowest and fastest round; and its median processor time."""

    side: str
    pattern: str
    block_nbytes: int
    threads: int
    median_nbytes_per_s: float
    lowest_nbytes_per_s: float
    highest_nbytes_per_s: float
    cpu_s_per_gb: float
    rounds: int


# One round: every other shard is written in "mixed", the rest is read.
PATTERNS: dict[str, Callable[[int], Op]] = {
    "write": lambda number: Op.WRITE,
    "read": lambda number: Op.READ,
    "mixed": lambda number: Op.WRITE if number % 2 else Op.READ,
}


class StoreSide:
    """The shard store: one key per shard, all submitted at once."""

    name = "store"
    checksum = Checksum.XXH3

    def __init__(self, directory: Path, file_nbytes: int, setting: Setting, memory: list[memoryview]) -> None:
        options = StorageOptions(
            engine="direct", block_nbytes=setting.block_nbytes, threads=setting.threads, checksum=self.checksum
        )
        self._memory = memory
        self._count = file_nbytes // _SHARD_NBYTES
        self._store = ShardStore.open([directory], file_nbytes, options=options)
        try:
            for number in range(self._count):
                self._store.create(str(number), _SHARD_NBYTES)
        except BaseException:
            self.close()
            raise

    def run(self, op_of: Callable[[int], Op]) -> None:
        tickets: list[Ticket] = []
        for number in range(self._count):
            memory = self._memory[number % len(self._memory)]
            if op_of(number) is Op.WRITE:
                tickets.append(self._store.submit_write(str(number), memory, priority=Priority.WRITE, tag=_TAG))
            else:
                tickets.append(self._store.submit_read(str(number), memory, tag=_TAG))
        joined = Ticket.all_of(tickets)
        if not joined.wait(_TIMEOUT_S):
            raise TimeoutError(f"no answer within {_TIMEOUT_S} s: {self._store.describe_in_flight()}")
        joined.result()

    def close(self) -> None:
        self._store.close()


class UncheckedSide(StoreSide):
    """The shard store without checksums."""

    name = "unchecked"
    checksum = Checksum.NONE


class PlainSide:
    """`preadv` and `pwritev` on threads, with nothing around them: what the drive gives a program like this."""

    name = "plain"

    def __init__(self, directory: Path, file_nbytes: int, setting: Setting, memory: list[memoryview]) -> None:
        self._memory = memory
        self._file_nbytes = file_nbytes
        self._block_nbytes = setting.block_nbytes
        self._path = directory / f"plain-{os.getpid()}"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        self._threads = ThreadPoolExecutor(setting.threads)
        try:
            os.posix_fallocate(self._fd, 0, file_nbytes)
        except BaseException:
            self.close()
            raise

    def run(self, op_of: Callable[[int], Op]) -> None:
        blocks = split_blocks(0, self._file_nbytes, self._block_nbytes)
        for done in [self._threads.submit(self._move, op_of, *block) for block in blocks]:
            done.result(_TIMEOUT_S)

    def _move(self, op_of: Callable[[int], Op], offset: int, nbytes: int) -> None:
        number, start = divmod(offset, _SHARD_NBYTES)
        memory = self._memory[number % len(self._memory)][start : start + nbytes]
        call = os.pwritev if op_of(number) is Op.WRITE else os.preadv
        if call(self._fd, [memory], offset) != nbytes:
            raise OSError(f"short transfer at {offset}")

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._fd)
        self._path.unlink()


SIDES: tuple[type[StoreSide] | type[PlainSide], ...] = (StoreSide, UncheckedSide, PlainSide)


@contextmanager
def _sides(
    directory: Path, file_nbytes: int, setting: Setting, memory: list[memoryview]
) -> Iterator[list[StoreSide | PlainSide]]:
    sides: list[StoreSide | PlainSide] = []
    try:
        for kind in SIDES:
            sides.append(kind(directory, file_nbytes, setting, memory))
        yield sides
    finally:
        for side in sides:
            side.close()


def measure(
    directory: Path, file_nbytes: int, setting: Setting, memory: list[memoryview], deadline_s: float, rounds: int
) -> list[Figure]:
    """Rounds of every pattern, the sides in turns and in changing order, until `rounds` or the time is over."""
    rates: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with _sides(directory, file_nbytes, setting, memory) as sides:
        for side in sides:
            side.run(PATTERNS["write"])  # blocks that were only reserved are slower to write, and quick to read
        for number in range(rounds):
            for pattern, op_of in PATTERNS.items():
                for side in sides if number % 2 == 0 else reversed(sides):
                    started_s, started_cpu_s = time.perf_counter(), time.process_time()
                    side.run(op_of)
                    rate = file_nbytes / (time.perf_counter() - started_s)
                    cpu_s_per_gb = (time.process_time() - started_cpu_s) / file_nbytes * 1e9
                    rates.setdefault((side.name, pattern), []).append((rate, cpu_s_per_gb))
            if time.monotonic() > deadline_s:
                break
    return [_figure(side, pattern, setting, some) for (side, pattern), some in rates.items()]


def _figure(side: str, pattern: str, setting: Setting, measured: list[tuple[float, float]]) -> Figure:
    rates, cpu = zip(*measured, strict=True)
    return Figure(
        side,
        pattern,
        setting.block_nbytes,
        setting.threads,
        statistics.median(rates),
        min(rates),
        max(rates),
        statistics.median(cpu),
        len(rates),
    )


def measure_checksum(memory: list[memoryview], rounds: int) -> float:
    """Bytes per second of the checksum on one core, block by block as the store computes it; the median round."""
    rates = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        for shard in memory:
            for start, nbytes in split_blocks(0, len(shard), BLOCK_NBYTES):
                xxhash.xxh3_64_intdigest(shard[start : start + nbytes])
        rates.append(len(memory) * _SHARD_NBYTES / (time.perf_counter() - started_s))
    return statistics.median(rates)


def describe_place(directory: Path) -> dict[str, Any]:
    """What the figures depend on: the machine, and the file system of a directory."""
    place = {"file_system": find_file_system(directory).name, "free_bytes": shutil.disk_usage(directory).free}
    return describe_machine() | place


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4M")
    return int(found.group(1)) * _UNITS[found.group(2)]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("directory", type=made_folder)
    parser.add_argument("--file", type=_size, default=1 << 30, help="bytes of each side's file, in shards of 32 MiB")
    parser.add_argument("--block", type=_size, default=DEFAULT_BLOCK_NBYTES)
    parser.add_argument("--threads", type=at_least(1), default=DEFAULT_THREADS)
    parser.add_argument("--sweep", action="store_true", help="several block sizes and depths")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--seconds", type=duration_s, default=45.0, help="no round starts later than this")
    parser.add_argument("--json", type=result_file)
    chosen = parser.parse_args(arguments)
    if not (chosen.file and chosen.block) or chosen.file % _SHARD_NBYTES or _SHARD_NBYTES % chosen.block:
        parser.error("--file must be a multiple of 32M, and --block a divisor of it")
    return chosen


def main(arguments: list[str]) -> int:
    chosen = parse(arguments)
    settings = [Setting(*pair) for pair in _SWEEP] if chosen.sweep else [Setting(chosen.block, chosen.threads)]
    machine = describe_place(chosen.directory)
    pool = HostPool(8 * _SHARD_NBYTES)
    memory = [pool.lease(_SHARD_NBYTES, "bench").memory for _ in range(8)]
    for number, block in enumerate(memory):
        block[:] = os.urandom(1 << 20) * (_SHARD_NBYTES >> 20)  # drives that compress must not gain from zeros
        block[0] = number
    started_s = time.monotonic()
    figures: list[Figure] = []
    for number, setting in enumerate(settings, start=1):
        deadline_s = started_s + chosen.seconds * number / len(settings)
        figures += measure(chosen.directory, chosen.file, setting, memory, deadline_s, chosen.rounds)
    checksum_rate = measure_checksum(memory, chosen.rounds)
    print(f"checksum alone, blocks of {BLOCK_NBYTES >> 10} KiB: {checksum_rate / 1e9:.1f} GB/s on one core")
    for figure in figures:
        print(
            f"{figure.block_nbytes >> 10:>6} KiB x {figure.threads}  {figure.pattern:<6}{figure.side:<10}"
            f"{figure.median_nbytes_per_s / 1e9:6.2f} GB/s  "
            f"({figure.lowest_nbytes_per_s / 1e9:.2f} to {figure.highest_nbytes_per_s / 1e9:.2f}, "
            f"{figure.rounds} rounds)  {figure.cpu_s_per_gb:.3f} CPU s/GB"
        )
    if chosen.json is not None:
        report = {
            "machine": machine,
            "file_nbytes": chosen.file,
            "checksum": {"block_nbytes": BLOCK_NBYTES, "median_nbytes_per_s": checksum_rate},
            "figures": [asdict(figure) for figure in figures],
        }
        chosen.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
