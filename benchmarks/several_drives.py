"""What the shard store makes of two drives of different speed: throttled directories of 200 and 50 MB/s.

    python benchmarks/several_drives.py DIRECTORY [--seconds 3] [--json FILE]

The whole path of the store runs: pieces, checksums, O_DIRECT where the directory has it, queues; only the drives are
modelled, by `storage.backends.throttled`, so that the figures say how well the store spreads its bytes, on any machine
whose disk does several times 250 MB/s. Every case writes all keys three times, as training does, in whole keys or in
chunks, and is measured after that.

`given`: the store is told the speeds. `equal`: it is told nothing, and has to find out. `wrong`: it is told that the
slow drive is four times as fast as the fast one. `stall`: the fast drive does not answer for two seconds; meanwhile the
other one serves what lies there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from infinity.bench.arguments import duration_s, made_folder, result_file
from storage.backends.base import Backend
from storage.backends.faulty import Fault, FaultyBackend
from storage.backends.throttled import Throttle, ThrottledBackend
from storage.pool import HostPool, Lease
from storage.store import ShardStore, StorageOptions
from storage.types import Op, Ticket, TrafficTag

if __package__:
    from benchmarks.storage_throughput import describe_place
else:
    from storage_throughput import describe_place

_TAG = TrafficTag("bench", 0)
_MB = 1_000_000
_FAST, _SLOW = 200 * _MB, 50 * _MB
_KEY_NBYTES = 16 << 20
_KEYS = 12
_CHUNK_NBYTES = 4 << 20
_IN_FLIGHT = 6  # transfers, as many as an engine keeps
_STALL_S = 2.0
_PASSES = 3
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Figure:
    """Bytes per second that one case reached, and as a part of what both drives have.

    Attributes:
        share_of_fast: of the bytes, what lies on the fast drive.
        adapting_s: what writing all keys three times took before.
    """

    case: str
    pattern: str
    nbytes_per_s: float
    of_both: float
    share_of_fast: float
    adapting_s: float
    seconds: float


class Bench:
    """A store over two throttled directories, and a program that keeps transfers in flight."""

    def __init__(self, folder: Path, pool: HostPool, rates: Sequence[float], speeds: Sequence[float] | None) -> None:
        self.faults: list[FaultyBackend] = []
        self.stack = ExitStack()
        waiting = deque(rates)

        def wrap(backend: Backend) -> Backend:
            rate = waiting.popleft()
            self.faults.append(FaultyBackend(ThrottledBackend(backend, Throttle(rate, rate))))
            return self.faults[-1]

        paths = [folder / "drive0", folder / "drive1"]
        self.store = ShardStore.open(
            paths, _KEYS * _KEY_NBYTES, options=StorageOptions(calibrate="off"), speeds=speeds, wrap_backend=wrap
        )
        self.stack.callback(self.store.close)
        self.lease: Lease = self.stack.enter_context(pool.lease(_KEY_NBYTES, "bench"))
        self.lease.memory[:] = bytes(range(256)) * (_KEY_NBYTES // 256)
        self.targets = [self.stack.enter_context(pool.lease(_KEY_NBYTES, "read")) for _ in range(_IN_FLIGHT)]
        for number in range(_KEYS):
            self.store.create(str(number), _KEY_NBYTES)
        self._next = 0

    def submit(self, op: Op, chunk_nbytes: int) -> tuple[Ticket, int]:
        """The next part of the next key."""
        at, self._next = self._next, (self._next + chunk_nbytes) % (_KEYS * _KEY_NBYTES)
        key, offset = str(at // _KEY_NBYTES), at % _KEY_NBYTES
        if op is Op.WRITE:
            memory = self.lease.memory[offset : offset + chunk_nbytes]
            return self.store.submit_write(key, memory, offset=offset, tag=_TAG), chunk_nbytes
        target = self.targets[(at // chunk_nbytes) % len(self.targets)]
        return self.store.submit_read(key, target.memory[:chunk_nbytes], offset=offset, tag=_TAG), chunk_nbytes

    def run(self, op: Op, chunk_nbytes: int, *, seconds: float = 0.0, nbytes: int = 0) -> list[tuple[float, int]]:
        """Keep transfers in flight for so long, and until so much has moved; when each ended, and its bytes."""
        in_flight = deque(self.submit(op, chunk_nbytes) for _ in range(self._depth(chunk_nbytes)))
        started_s = time.perf_counter()
        ended: list[tuple[float, int]] = []
        while in_flight:
            ticket, moved_nbytes = in_flight.popleft()
            if not ticket.wait(_TIMEOUT_S):
                raise TimeoutError(f"no answer within {_TIMEOUT_S} s: {self.store.describe_in_flight()}")
            ticket.result()
            now_s = time.perf_counter() - started_s
            nbytes -= moved_nbytes
            if now_s < seconds or nbytes > 0:
                ended.append((now_s, moved_nbytes))
                in_flight.append(self.submit(op, chunk_nbytes))
        return ended

    @staticmethod
    def _depth(chunk_nbytes: int) -> int:
        return _IN_FLIGHT * _KEY_NBYTES // chunk_nbytes

    def share_of_fast(self, fast: int) -> float:
        held = [report.held_nbytes for report in self.store.drive_report()]
        return held[fast] / sum(held)


def measure(folder: Path, pool: HostPool, case: str, pattern: str, chunk_nbytes: int, seconds: float) -> Figure:
    """One case: how fast it is after all keys were written a few times."""
    speeds = {"given": [4.0, 1.0], "equal": None, "wrong": [1.0, 4.0]}[case]
    op = Op(pattern)
    with TemporaryDirectory(dir=folder) as inside:
        bench = Bench(Path(inside), pool, (_FAST, _SLOW), speeds)
        with bench.stack:
            started_s = time.perf_counter()
            bench.run(Op.WRITE, chunk_nbytes, nbytes=_PASSES * _KEYS * _KEY_NBYTES)
            adapting_s = time.perf_counter() - started_s
            ended = bench.run(op, chunk_nbytes, seconds=seconds, nbytes=_KEYS * _KEY_NBYTES)  # all keys, at least
            share = bench.share_of_fast(0)
    rate = sum(nbytes for _, nbytes in ended[1:]) / (ended[-1][0] - ended[0][0])
    return Figure(case, f"{pattern} {chunk_nbytes >> 20} MiB", rate, rate / (_FAST + _SLOW), share, adapting_s, seconds)


def measure_stall(folder: Path, pool: HostPool) -> dict[str, object]:
    """The fast drive is silent for two seconds: what the other one completes meanwhile, and when."""
    small_nbytes = 512 << 10  # such keys lie on one drive each
    with TemporaryDirectory(dir=folder) as inside:
        bench = Bench(Path(inside), pool, (_FAST, _SLOW), [4.0, 1.0])
        with bench.stack:
            for number in range(100):
                bench.store.create(f"small {number}", small_nbytes)
            on_slow = [f"small {n}" for n in range(100) if bench.store._keys[f"small {n}"].pieces[0].extent.drive == 1]
            bench.faults[0].inject(Fault.STUCK, times=None)
            started_s = time.perf_counter()
            timer = threading.Timer(_STALL_S, lambda: (bench.faults[0].clear(), bench.faults[0].release_stuck()))
            timer.start()
            tickets = {
                n: bench.store.submit_write(f"small {n}", bench.lease.memory[:small_nbytes], tag=_TAG)
                for n in range(100)
            }
            done_s = []
            for name in on_slow:
                tickets[int(name.split()[1])].wait(_TIMEOUT_S)
                done_s.append(time.perf_counter() - started_s)
            waiting = sum(not ticket.done for ticket in tickets.values())
            timer.join()
            bench.store.drain(_TIMEOUT_S)
            return {
                "stall_s": _STALL_S,
                "on_the_other_drive": len(on_slow),
                "median_s": statistics.median(done_s),
                "last_s": max(done_s),
                "waiting_for_the_stalled_drive_then": waiting,
                "all_done_s": time.perf_counter() - started_s,
            }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("directory", type=made_folder)
    parser.add_argument("--seconds", type=duration_s, default=3.0, help="of each measurement, at least")
    parser.add_argument("--json", type=result_file)
    chosen = parser.parse_args(arguments)
    machine = describe_place(chosen.directory)
    pool = HostPool(2 * _IN_FLIGHT * _KEY_NBYTES)
    figures = []
    for case in ("given", "equal", "wrong"):
        for pattern in ("write", "read"):
            for chunk_nbytes in (_KEY_NBYTES, _CHUNK_NBYTES):
                figure = measure(chosen.directory, pool, case, pattern, chunk_nbytes, chosen.seconds)
                figures.append(figure)
                print(
                    f"{figure.case:<8}{figure.pattern:<14}{figure.nbytes_per_s / _MB:6.1f} MB/s  "
                    f"{figure.of_both:.3f} of both drives, {figure.share_of_fast:.3f} of the bytes on the fast one, "
                    f"{figure.adapting_s:.1f} s to adapt",
                    flush=True,
                )
    stall = measure_stall(chosen.directory, pool)
    print(f"stall: {stall}")
    if chosen.json is not None:
        report = {
            "machine": machine,
            "drives_nbytes_per_s": [_FAST, _SLOW],
            "figures": [asdict(figure) for figure in figures],
            "stall": stall,
        }
        chosen.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
