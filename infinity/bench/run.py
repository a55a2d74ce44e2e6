"""One `infinity bench tier`: the drives alone and together, fio, memory, sustained writing."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from infinity.bench.engines import BenchEngine
from infinity.bench.fio import FioSetup, compare, find_fio, fio_version
from infinity.bench.load import check_fits
from infinity.bench.machine import describe_drive, describe_machine
from infinity.bench.profiles import BUSY, Profile, Workload
from infinity.bench.result import BenchResult, Drive
from infinity.bench.sustained import Point, write_sustained
from infinity.bench.target import Target, check_directory, open_target
from infinity.bench.tier import Progress, Series, fill, run_profile
from infinity.errors import ConfigError
from storage.types import Op

_MEMORY_SECONDS = 0.2
_MEMORY_REPEATS = 3


@dataclass(frozen=True, slots=True)
class TierOptions:
    """What to measure.

    Attributes:
        paths: directories, one per drive.
        file_nbytes: size of the test file; None: 1 GiB, less where little is free.
        comparison: workloads to run beside fio; None: do not.
        fio: how it is run; None: as is best for each workload.
        comparison_engine: what of ours runs beside it; None: what is best for each workload.
        sustained_nbytes: bytes of a sustained write; None: none.
        measures_memory: host memory, link and kernels too.
    """

    paths: tuple[Path, ...]
    profiles: tuple[Profile, ...]
    engines: tuple[BenchEngine, ...]
    repeats: int
    seconds: float
    file_nbytes: int | None = None
    comparison: Profile | None = None
    comparison_repeats: int = 5
    fio: FioSetup | None = None
    comparison_engine: BenchEngine | None = None
    sustained_nbytes: int | None = None
    measures_memory: bool = True


def run_tier(options: TierOptions, progress: Progress) -> BenchResult:
    """Measure; test files are removed at the end, also after an error or Ctrl-C.

    Raises:
        ConfigError: a directory or an option cannot work.
        InfinityError, StorageError: a measurement failed.
    """
    if len({path.resolve() for path in options.paths}) < len(options.paths):
        raise ConfigError("a directory is given twice; give one directory per drive")
    for path in options.paths:
        check_directory(path)
    if options.comparison is not None:
        find_fio()
    started_s = time.perf_counter()
    result = BenchResult(describe_machine())
    with ExitStack() as closing:
        targets = [closing.enter_context(open_target(path, options.file_nbytes)) for path in options.paths]
        result.drives += map(_drive, targets)
        workloads = _workloads(options)
        for target in targets:
            for workload in workloads:
                check_fits(workload, target.nbytes)
        for target in targets if workloads else ():
            progress(f"writing the test file in {target.directory}")
            result.written_nbytes += fill(target)
        _measure_profiles(options, targets, result, progress)
        _compare(options, targets, result, progress)
        _measure_memory(options, targets, result, progress)
    _sustain(options, result, progress)
    result.elapsed_s = time.perf_counter() - started_s
    result.written_nbytes += sum(run.moved_nbytes[Op.WRITE] for series in result.series for run in series.runs)
    return result


def _workloads(options: TierOptions) -> list[Workload]:
    """All that runs on the test files."""
    profiles = [*options.profiles, *([options.comparison] if options.comparison is not None else [])]
    return [w for profile in profiles for w in profile.workloads] + ([BUSY] if options.measures_memory else [])


def _drive(target: Target) -> Drive:
    return Drive(
        str(target.directory),
        target.file_system,
        target.nbytes,
        describe_drive(target.directory),
        target.direct_problem,
        target.notes,
    )


def _measure_profiles(options: TierOptions, targets: list[Target], result: BenchResult, progress: Progress) -> None:
    groups = [[target] for target in targets]
    if len(targets) > 1:
        groups.append(targets)
    measured: set[tuple[BenchEngine | Target, ...]] = set()
    for engine in options.engines:
        for group in groups:
            used = _usable(engine, group)
            if used is None:
                result.notes.append(
                    f"engine {engine} was not measured on {' + '.join(str(t.directory) for t in group)}: "
                    "no direct I/O there; buffered was, instead"
                )
                used = BenchEngine.BUFFERED
            if (used, *group) in measured:
                continue
            measured.add((used, *group))
            for profile in options.profiles:
                result.series += run_profile(
                    profile, used, group, repeats=options.repeats, seconds=options.seconds, progress=progress
                )
    if any(series.engine.is_cached for series in result.series):
        result.notes.append(
            "buffered and aiofiles go through the page cache: reads pass over the file once, writes end with fdatasync"
        )


def _usable(engine: BenchEngine, targets: list[Target]) -> BenchEngine | None:
    has_direct = all(target.direct_problem is None for target in targets)
    return engine if has_direct or engine.is_cached else None


def _compare(options: TierOptions, targets: list[Target], result: BenchResult, progress: Progress) -> None:
    if options.comparison is None:
        return
    result.fio_version = fio_version()
    for target in targets:
        rows = compare(
            options.comparison,
            target,
            repeats=options.comparison_repeats,
            seconds=options.seconds,
            setup=options.fio,
            engine=options.comparison_engine,
            progress=progress,
        )
        directory = str(target.directory)
        result.comparisons[directory] = rows
        result.series += [Series(row.workload, row.engine, (directory,), row.ours) for row in rows]
        result.written_nbytes += sum(row.unseen_written_nbytes for row in rows)


def _measure_memory(options: TierOptions, targets: list[Target], result: BenchResult, progress: Progress) -> None:
    if not options.measures_memory:
        return
    from infinity.bench.memory import measure_memory  # imports torch, which takes seconds

    report, written_nbytes = measure_memory(
        targets[0] if targets else None, repeats=_MEMORY_REPEATS, seconds=_MEMORY_SECONDS, progress=progress
    )
    result.memory = report
    result.written_nbytes += written_nbytes


def _sustain(options: TierOptions, result: BenchResult, progress: Progress) -> None:
    if options.sustained_nbytes is None:
        return
    total_nbytes = options.sustained_nbytes
    for path in options.paths:

        def watch(point: Point, path: Path = path) -> None:
            share = point.written_nbytes / total_nbytes
            progress(f"sustained write in {path}: {share:.0%}, {point.bytes_per_s / 1e6:,.0f} MB/s")

        result.sustained.append(write_sustained(path, total_nbytes, watch=watch))
        result.written_nbytes += result.sustained[-1].written_nbytes
