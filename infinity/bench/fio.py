"""fio beside our own engine: same file, block size and depth, taking turns.

fio is compared at its best: with the I/O engine that is fastest for a workload, and with its buffers in huge pages as
ours are. By itself it has them in pages of 4 KiB, which halves what some drives give it; being faster than that says
nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infinity.bench.engines import BenchEngine
from infinity.bench.profiles import Order, Profile, Workload
from infinity.bench.statistics import Spread, spread
from infinity.bench.target import Target
from infinity.bench.tier import Measurement, Progress, ready
from infinity.errors import ConfigError, InfinityError
from storage.backends.kernel_aio import why_not
from storage.backends.probe import Engine
from storage.calibration import EngineTrial, choose_by_cost
from storage.types import Op

_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # glibc 2.35: malloc advises huge pages
_THREADED_ENGINES = ("psync", "sync", "vsync", "pvsync", "pvsync2")  # one call at a time: depth is a number of threads
_GRACE_S = 120.0


@dataclass(frozen=True, slots=True)
class FioSetup:
    """How fio is run.

    Attributes:
        engine: its `ioengine`.
        huge_pages: put its buffers in huge pages, as ours are. By itself it does not, and then a drive gets more and
            smaller segments.
    """

    engine: str = "libaio"
    huge_pages: bool = False

    @property
    def name(self) -> str:
        """As reports name it: the ioengine, and whether its buffers lie in huge pages."""
        return f"{self.engine}, huge pages" if self.huge_pages else self.engine


_CANDIDATES = (FioSetup("libaio", huge_pages=True), FioSetup("io_uring", huge_pages=True), FioSetup("psync"))
_TRIALS = 2
_TRIAL_SHARE, _LEAST_TRIAL_S = 0.5, 0.1  # of the length of a run


@dataclass(frozen=True, slots=True)
class FioRun:
    """What fio says of one run.

    Attributes:
        read_bytes_per_s, write_bytes_per_s: 0 in a direction that did not run.
        cpu_s: of its jobs, in user space and in the kernel.
        moved_nbytes: in both directions.
        written_nbytes: in one.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    cpu_s: float
    moved_nbytes: int
    written_nbytes: int

    @property
    def bytes_per_s(self) -> float:
        """Bytes of both directions in a second."""
        return self.read_bytes_per_s + self.write_bytes_per_s

    @property
    def cpu_s_per_gb(self) -> float:
        """Seconds of CPU time for 10^9 bytes."""
        return self.cpu_s / (self.moved_nbytes / 1e9)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload on both sides; `ours[i]`, moved by `engine`, and `fio[i]` ran one after the other.

    Attributes:
        trials_written_nbytes: what was written to find out how each side is at its best.
    """

    workload: Workload
    engine: BenchEngine
    setup: FioSetup
    ours: tuple[Measurement, ...]
    fio: tuple[FioRun, ...]
    trials_written_nbytes: int

    @property
    def unseen_written_nbytes(self) -> int:
        """What fio wrote, and what trials did: all but `ours`."""
        return self.trials_written_nbytes + sum(run.written_nbytes for run in self.fio)

    @property
    def our_bytes_per_s(self) -> Spread:
        """Of all runs of infinity, in bytes/s."""
        return spread([run.bytes_per_s for run in self.ours])

    @property
    def fio_bytes_per_s(self) -> Spread:
        """Of all runs of fio, in bytes/s."""
        return spread([run.bytes_per_s for run in self.fio])

    @property
    def ratio(self) -> float:
        """Median over median; above 1 ours is faster."""
        return self.our_bytes_per_s.median / self.fio_bytes_per_s.median

    @property
    def paired_ratio(self) -> Spread:
        """Of each pair: what disturbs the drive for longer than a run cancels out."""
        return spread([ours.bytes_per_s / fio.bytes_per_s for ours, fio in zip(self.ours, self.fio, strict=True)])

    @property
    def our_cpu_s_per_gb(self) -> Spread:
        """Of all runs of infinity, in seconds of CPU time for 10^9 bytes."""
        return spread([run.cpu_s_per_gb for run in self.ours])

    @property
    def fio_cpu_s_per_gb(self) -> Spread:
        """Of all runs of fio, in seconds of CPU time for 10^9 bytes."""
        return spread([run.cpu_s_per_gb for run in self.fio])

    @property
    def cpu_ratio(self) -> float:
        """Median over median of the CPU time per byte; below 1 ours needs less."""
        return self.our_cpu_s_per_gb.median / self.fio_cpu_s_per_gb.median


def find_fio() -> str:
    """Path of fio.

    Raises:
        ConfigError: it is not on PATH.
    """
    path = shutil.which("fio")
    if path is None:
        raise ConfigError(
            "--compare-fio: there is no fio on PATH. Install it (Debian and Ubuntu: apt install fio; Fedora: dnf "
            "install fio), or leave the option away: infinity measures without it"
        )
    return path


def fio_version() -> str:
    """Such as "fio-3.33"."""
    answer = subprocess.run([find_fio(), "--version"], capture_output=True, text=True, timeout=30, check=False)
    return answer.stdout.strip()


def compare(
    profile: Profile,
    target: Target,
    *,
    repeats: int,
    seconds: float,
    setup: FioSetup | None,
    progress: Progress,
    engine: BenchEngine | None = None,
) -> list[Comparison]:
    """Run every workload of a profile on both sides in turn; who begins changes with every repeat.

    Args:
        setup: how fio is run; None: as is best for each workload.
        engine: ours; None: as `nvme.engine = "auto"` chooses when it has measured the drive.

    Raises:
        ConfigError: there is no fio, or the directory cannot do direct I/O.
        InfinityError: fio failed.
    """
    find_fio()
    if target.direct_problem is not None:
        raise ConfigError(
            f"--compare-fio {target.directory}: direct I/O does not work here ({target.direct_problem}), and through "
            "the page cache both would measure memory. Choose a directory on a drive"
        )
    results = []
    for workload in profile.workloads:
        progress(f"{workload.name} beside fio, {target.directory}")
        theirs_tried = Trials({setup: 0.0}, 0) if setup is not None else try_setups(workload, target, seconds)
        chosen = theirs_tried.best
        used, tried_nbytes = (engine, 0) if engine is not None else best_engine(workload, target, seconds)
        ours, theirs = [], []
        with ready(workload, used, [target]) as runner:
            for number in range(repeats):
                if number % 2:
                    theirs.append(run_fio(workload, target, seconds, chosen))
                ours.append(runner.run(seconds))
                if not number % 2:
                    theirs.append(run_fio(workload, target, seconds, chosen))
        tried_nbytes += theirs_tried.written_nbytes
        results.append(Comparison(workload, used, chosen, tuple(ours), tuple(theirs), tried_nbytes))
    return results


def best_engine(workload: Workload, target: Target, seconds: float) -> tuple[BenchEngine, int]:
    """Of our engines with O_DIRECT the one with the least CPU time of those about as fast as the fastest.

    Returns:
        The engine, and how many bytes were written to find out.
    """
    if why_not() is not None:
        return BenchEngine.DIRECT, 0
    runs: dict[BenchEngine, list[Measurement]] = {BenchEngine.DIRECT: [], BenchEngine.AIO: []}
    for _ in range(_TRIALS):
        for engine, found in runs.items():
            with ready(workload, engine, [target]) as runner:
                found.append(runner.run(max(seconds * _TRIAL_SHARE, _LEAST_TRIAL_S)))
    best = [max(found, key=lambda run: run.bytes_per_s) for found in runs.values()]
    trials = [EngineTrial(Engine(e), r.bytes_per_s, r.cpu_s_per_gb) for e, r in zip(runs, best, strict=True)]
    written_nbytes = sum(run.moved_nbytes[Op.WRITE] for found in runs.values() for run in found)
    return BenchEngine(choose_by_cost(trials).engine), written_nbytes


@dataclass(frozen=True, slots=True)
class Trials:
    """How fast the ways to run fio were that work, in bytes per second, and what trying them wrote."""

    rates: dict[FioSetup, float]
    written_nbytes: int

    @property
    def best(self) -> FioSetup:
        return max(self.rates, key=lambda setup: self.rates[setup])


def try_setups(workload: Workload, target: Target, seconds: float) -> Trials:
    """Try a few ways to run fio, in turns; what this fio or kernel does not have is left out.

    Raises:
        InfinityError: none of them works.
    """
    rates: dict[FioSetup, float] = {}
    written_nbytes = 0
    failure: InfinityError | None = None
    for _ in range(_TRIALS):
        for setup in _CANDIDATES:
            try:
                run = run_fio(workload, target, max(seconds * _TRIAL_SHARE, _LEAST_TRIAL_S), setup)
            except InfinityError as error:
                failure = error
                continue
            rates[setup] = max(rates.get(setup, 0.0), run.bytes_per_s)
            written_nbytes += run.written_nbytes
    if not rates and failure is not None:
        raise failure
    return Trials(rates, written_nbytes)


def run_fio(workload: Workload, target: Target, seconds: float, setup: FioSetup) -> FioRun:
    """One run of fio on the file of `target`.

    Raises:
        InfinityError: it failed, or did not end.
    """
    command = [find_fio(), *_arguments(workload, target, seconds, setup.engine)]
    environment = os.environ | (_HUGE_PAGES if setup.huge_pages else {})
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds + _GRACE_S, check=False, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise InfinityError(f"fio has not ended {_GRACE_S:.0f} s after its time was over; it was stopped") from error
    if answer.returncode != 0:
        problem = (answer.stderr.strip() or answer.stdout.strip())[:500]
        raise InfinityError(f"fio failed with exit code {answer.returncode}: {problem}\ncommand: {' '.join(command)}")
    return parse(answer.stdout)


def _arguments(workload: Workload, target: Target, seconds: float, engine: str) -> list[str]:
    kinds = {100: "read", 0: "write"}
    is_random = workload.order is Order.RANDOM
    kind = ("rand" if is_random else "") + kinds.get(workload.read_percent, "rw")
    arguments = [
        "--name=infinity-compare",
        f"--filename={target.path}",
        f"--rw={kind}",
        f"--rwmixread={workload.read_percent}",
        f"--bs={workload.block_nbytes}",
        f"--ioengine={engine}",
        f"--runtime={seconds:g}",
        "--time_based",
        "--direct=1",
        "--thread",
        "--fallocate=none",
        "--allow_file_create=0",
        "--group_reporting",
        "--output-format=json",
    ]
    if engine not in _THREADED_ENGINES:
        return [*arguments, f"--iodepth={workload.depth}", f"--size={target.nbytes}"]
    share_nbytes = target.nbytes // workload.depth // workload.block_nbytes * workload.block_nbytes
    places = [f"--size={share_nbytes}", f"--offset_increment={share_nbytes}"]
    return [*arguments, "--iodepth=1", f"--numjobs={workload.depth}", *places]


def parse(text: str) -> FioRun:
    """The figures in fio's JSON output, whatever it printed before.

    Raises:
        InfinityError: this is not what fio writes, or it moved nothing.
    """
    try:
        jobs: Sequence[dict[str, Any]] = json.loads(text[text.index("{") :])["jobs"]
        run = FioRun(
            read_bytes_per_s=sum(float(job["read"]["bw_bytes"]) for job in jobs),
            write_bytes_per_s=sum(float(job["write"]["bw_bytes"]) for job in jobs),
            cpu_s=sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000 for job in jobs),
            moved_nbytes=sum(int(job[kind]["io_bytes"]) for job in jobs for kind in ("read", "write")),
            written_nbytes=sum(int(job["write"]["io_bytes"]) for job in jobs),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InfinityError(f"fio's JSON output could not be read ({error}): {text[:200]!r}") from error
    if not run.moved_nbytes:
        raise InfinityError("fio moved no bytes in the time that it had: give it more --seconds")
    return run
