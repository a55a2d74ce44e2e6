"""Running workloads on drives, through the same backends that training uses."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from infinity.bench.engines import BenchEngine, make_engine
from infinity.bench.load import Load, Schedule
from infinity.bench.profiles import Profile, Workload
from infinity.bench.statistics import Latencies, Spread, spread
from infinity.bench.target import Target
from infinity.sizes import MIB
from storage.backends.base import Backend
from storage.backends.cost import IoCost
from storage.errors import IoTimeoutError
from storage.pool import HostPool
from storage.types import Op, Ticket

_LANDING_TIMEOUT_S = 120.0
_FILL = Workload("fill", 0, 4 * MIB, 4 * MIB, depth=4, transfers=4)
_SEED = 7
_MOST_WRITE_PASSES = 1


@dataclass(frozen=True, slots=True)
class CpuTime:
    """CPU seconds of all threads, in user space and in the kernel."""

    user_s: float
    system_s: float

    @classmethod
    def now(cls) -> CpuTime:
        """Of this process until now."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(usage.ru_utime, usage.ru_stime)

    def __sub__(self, before: CpuTime) -> CpuTime:
        return CpuTime(self.user_s - before.user_s, self.system_s - before.system_s)

    @property
    def total_s(self) -> float:
        """Seconds of CPU time, in user and in system mode."""
        return self.user_s + self.system_s


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of a workload on one drive or on several at once.

    Attributes:
        elapsed_s: from the first submission until everything has landed (through the page cache: until it is on disk).
        cpu: of the whole process meanwhile.
        moved_nbytes, latencies_ns: by direction.
        io_cost: of the threads that moved the blocks.
    """

    elapsed_s: float
    cpu: CpuTime
    moved_nbytes: dict[Op, int]
    latencies_ns: dict[Op, npt.NDArray[np.int64]]
    io_cost: IoCost

    @property
    def nbytes(self) -> int:
        """Bytes of both directions."""
        return sum(self.moved_nbytes.values())

    @property
    def bytes_per_s(self) -> float:
        """Bytes of both directions in a second."""
        return self.nbytes / self.elapsed_s

    def rate(self, op: Op) -> float:
        """Bytes per second in one direction."""
        return self.moved_nbytes[op] / self.elapsed_s

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds for a thousand million bytes."""
        return self.cpu.total_s / (self.nbytes / 1e9)


@dataclass(frozen=True, slots=True)
class Series:
    """The repeats of a workload with one engine on one drive or several at once."""

    workload: Workload
    engine: BenchEngine
    directories: tuple[str, ...]
    runs: tuple[Measurement, ...]

    @property
    def bytes_per_s(self) -> Spread:
        """Of all its runs, in bytes/s."""
        return spread([run.bytes_per_s for run in self.runs])

    @property
    def cpu_s_per_gb(self) -> Spread:
        """Of all its runs, in seconds of CPU time for 10^9 bytes."""
        return spread([run.cpu_s_per_gb for run in self.runs])

    @property
    def python_us_per_operation(self) -> Spread:
        """CPU time in Python for a block, in microseconds."""
        return spread([run.io_cost.python_s_per_operation * 1e6 for run in self.runs])

    def rate(self, op: Op) -> Spread:
        """Bytes per second in one direction."""
        return spread([run.rate(op) for run in self.runs])

    def latencies_ns(self, op: Op | None = None) -> npt.NDArray[np.int64]:
        """Of every transfer of all repeats; both directions unless one is given."""
        ops = list(Op) if op is None else [op]
        return np.concatenate([run.latencies_ns[each] for run in self.runs for each in ops])

    def latencies(self, op: Op | None = None) -> Latencies:
        """What these are like."""
        return Latencies.of(self.latencies_ns(op))


class Runner:
    """A workload, ready to be run any number of times: backends started, memory faulted in."""

    def __init__(
        self,
        workload: Workload,
        engine: BenchEngine,
        targets: Sequence[Target],
        backends: Sequence[Backend],
        memories: Sequence[Sequence[memoryview]],
    ) -> None:
        self.workload = workload
        self.engine = engine
        self.targets = tuple(targets)
        self._backends = backends
        self._memories = memories
        self._schedules = [Schedule.of(workload, target.nbytes) for target in targets]

    def loads(self, seconds: float, most_transfers: int | None = None) -> list[Load]:
        """One load per drive, not started."""
        parts = zip(self._backends, self.targets, self._schedules, self._memories, strict=True)
        return [
            Load(backend, target, schedule, memories, seconds=seconds, most_transfers=most_transfers)
            for backend, target, schedule, memories in parts
        ]

    def run(self, seconds: float, most_passes: int | None = None) -> Measurement:
        """Load every drive for `seconds`, or for so many passes over the file, if they end before.

        Through the page cache a run with reads ends after one pass: a second one would measure memory.

        Raises:
            StorageError: a transfer failed, or did not end.
        """
        is_cached, workload = self.engine.is_cached, self.workload
        if is_cached:
            for target in self.targets:
                target.drop_cache()
        if is_cached and workload.has_reads:
            most_passes = 1
        length = min(len(schedule.ops) for schedule in self._schedules)
        loads = self.loads(seconds, None if most_passes is None else most_passes * length)
        io_cost = self._io_cost()
        cpu, started_s = CpuTime.now(), time.perf_counter()
        for load in loads:
            load.start()
        self.wait(loads, seconds)
        ended_s = max(load.ended_s for load in loads)
        if is_cached and workload.has_writes:
            for target in self.targets:
                target.sync()
            ended_s = time.perf_counter()
        return self._measured(loads, ended_s - started_s, CpuTime.now() - cpu, self._io_cost() - io_cost)

    def wait(self, loads: Sequence[Load], seconds: float) -> None:
        """Until what was submitted has landed; failures are raised.

        Raises:
            IoTimeoutError: transfers are still in flight long after `seconds`.
        """
        ended = Ticket.all_of([load.ended for load in loads])
        try:
            if not ended.wait(seconds + _LANDING_TIMEOUT_S):
                stuck = [f"{r.op.value} at {r.offset} of {r.path}" for b in self._backends for r in b.in_flight()]
                raise IoTimeoutError(
                    f"transfers submitted {seconds + _LANDING_TIMEOUT_S:.0f} s ago have not ended: {'; '.join(stuck)}. "
                    "See the kernel log (dmesg) for errors of the drive"
                )
        finally:
            for load in loads:
                load.stop()
        ended.result()

    def _io_cost(self) -> IoCost:
        return IoCost.total(backend.cost for backend in self._backends)

    def _measured(self, loads: Sequence[Load], elapsed_s: float, cpu: CpuTime, io_cost: IoCost) -> Measurement:
        return Measurement(
            elapsed_s,
            cpu,
            {op: sum(load.moved_nbytes(op) for load in loads) for op in Op},
            {op: np.concatenate([load.latencies_ns(op) for load in loads]) for op in Op},
            io_cost,
        )


@contextmanager
def ready(workload: Workload, engine: BenchEngine, targets: Sequence[Target]) -> Iterator[Runner]:
    """Start what a workload needs; everything is closed at the end."""
    nbytes = workload.transfers * workload.transfer_nbytes
    with ExitStack() as closing:
        pool = HostPool(nbytes * len(targets))
        closing.callback(pool.close)
        memories = []
        for target in targets:
            lease = pool.lease(nbytes, f"bench of {target.directory}")
            closing.callback(lease.release)
            _randomise(lease.memory)
            size = workload.transfer_nbytes
            memories.append([lease.memory[start : start + size] for start in range(0, nbytes, size)])
        backends = []
        for _ in targets:
            backend = make_engine(engine, depth=workload.depth, block_nbytes=workload.block_nbytes)
            closing.callback(backend.close)  # before the memory goes: the last registered is called first
            backends.append(backend)
        yield Runner(workload, engine, targets, backends, memories)


def _randomise(memory: memoryview) -> None:
    """Content that a drive cannot compress; also faults the memory in."""
    random = np.random.default_rng(_SEED)
    np.frombuffer(memory, dtype=np.uint64)[:] = random.integers(0, 1 << 64, len(memory) // 8, dtype=np.uint64)


def fill(target: Target) -> int:
    """Write the whole file once, so that reads find data and writes find allocated space; bytes written."""
    engine = BenchEngine.DIRECT if target.direct_problem is None else BenchEngine.BUFFERED
    with ready(_FILL, engine, [target]) as runner:
        loads = runner.loads(seconds=float("inf"), most_transfers=target.nbytes // _FILL.transfer_nbytes)
        for load in loads:
            load.start()
        runner.wait(loads, seconds=3600.0)
        target.sync()
        return sum(load.moved_nbytes(Op.WRITE) for load in loads)


Progress = Callable[[str], None]


def run_profile(
    profile: Profile,
    engine: BenchEngine,
    targets: Sequence[Target],
    *,
    repeats: int,
    seconds: float,
    progress: Progress,
) -> list[Series]:
    """Every workload of a profile, `repeats` times, on the given drives at once."""
    series = []
    directories = tuple(str(target.directory) for target in targets)
    for workload in profile.workloads:
        progress(f"{workload.name}, {engine.value}, {' + '.join(directories)}")
        with ready(workload, engine, targets) as runner:
            # Writing wears a drive: a fast one is known after a pass.
            passes = _MOST_WRITE_PASSES if workload.has_writes else None
            runs = [runner.run(profile.seconds or seconds, passes) for _ in range(profile.repeats or repeats)]
        series.append(Series(workload, engine, directories, tuple(runs)))
    return series
