"""`infinity bench tier` on real files, small and short: figures add up, files go, output has its shape."""

from __future__ import annotations

import itertools
import json
import os
import stat
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from infinity.bench import fio
from infinity.bench.engines import AiofilesBackend, BenchEngine
from infinity.bench.fio_json import to_files, to_json
from infinity.bench.html import to_html
from infinity.bench.load import Load, Schedule
from infinity.bench.memory import measure_memory
from infinity.bench.profiles import Profile, Workload, block_load, comparison
from infinity.bench.result import BenchResult
from infinity.bench.run import TierOptions, run_tier
from infinity.bench.sustained import write_sustained
from infinity.bench.target import open_target
from infinity.bench.tier import fill, ready, run_profile
from infinity.errors import ConfigError, InfinityError
from infinity.sizes import MIB
from storage.backends.cost import IoCost
from storage.backends.kernel_aio import why_not
from storage.errors import ClosedError, IoError
from storage.types import IoRequest, Op

FILE_NBYTES = 32 * MIB
SHORT = Profile("short", "", (block_load("short", 100, MIB, 4), block_load("short", 50, MIB, 4)))
TRANSFERS = Profile("transfers", "", (Workload("transfers", 75, 4 * MIB, MIB, depth=2, transfers=3),))


def _quiet(_: str) -> None:
    """Nobody watches."""


def _options(*paths: Path, **settings: object) -> TierOptions:
    chosen: dict[str, object] = {
        "profiles": (SHORT,),
        "engines": (BenchEngine.DIRECT,),
        "repeats": 2,
        "seconds": 0.02,
        "file_nbytes": FILE_NBYTES,
        "measures_memory": False,
    }
    return TierOptions(paths=paths, **(chosen | settings))  # type: ignore[arg-type]


def _is_direct(folder: Path) -> bool:
    with open_target(folder, 16 * MIB) as target:
        return target.direct_problem is None


@pytest.mark.parametrize("engine", list(BenchEngine))
@pytest.mark.parametrize("profile", [SHORT, TRANSFERS], ids=lambda profile: profile.name)
def test_every_transfer_is_counted_once(tmp_path: Path, engine: BenchEngine, profile: Profile) -> None:
    if engine is BenchEngine.DIRECT and not _is_direct(tmp_path):
        pytest.skip("no direct I/O here")
    with open_target(tmp_path, FILE_NBYTES) as target:
        assert fill(target) == FILE_NBYTES
        for series in run_profile(profile, engine, [target], repeats=2, seconds=0.02, progress=_quiet):
            size = series.workload.transfer_nbytes
            for run in series.runs:
                assert run.nbytes >= series.workload.transfers * size
                assert {op: len(run.latencies_ns[op]) * size for op in Op} == run.moved_nbytes
                assert run.elapsed_s > 0
                assert run.cpu.total_s > 0
            assert (series.latencies(Op.WRITE).count > 0) == series.workload.has_writes
    assert list(tmp_path.iterdir()) == []


def test_reads_bring_what_was_written(tmp_path: Path) -> None:
    workload = block_load("x", 100, MIB, 4)
    with open_target(tmp_path, FILE_NBYTES) as target:
        fill(target)
        engine = BenchEngine.DIRECT if target.direct_problem is None else BenchEngine.BUFFERED
        with ready(workload, engine, [target]) as runner:
            memory = runner._memories[0]
            for piece in memory:
                piece[:] = bytes(len(piece))
            runner.run(0.02)
            assert all(bytes(piece[:64]) != bytes(64) for piece in memory)


def test_a_run_with_writes_ends_after_one_pass(tmp_path: Path) -> None:
    profile = Profile("writes", "", (block_load("writes", 0, MIB, 4),))
    with open_target(tmp_path, FILE_NBYTES) as target:
        (series,) = run_profile(profile, BenchEngine.BUFFERED, [target], repeats=1, seconds=30.0, progress=_quiet)
    assert series.runs[0].nbytes == FILE_NBYTES


class _Backend:
    """Serves a few requests, then fails; completes where it is submitted from, after that has returned."""

    name = "broken"
    opens_direct = False
    progress = 0
    cost = IoCost()

    def __init__(self, *, refuse: bool) -> None:
        self._refuse = refuse
        self.waiting: list[IoRequest] = []

    def submit(self, request: IoRequest) -> None:
        if self._refuse and len(self.waiting) == 2:
            raise ClosedError("closed")
        self.waiting.append(request)

    def promote(self, key: str) -> None:
        """Everything goes at once."""

    def in_flight(self) -> list[IoRequest]:
        return self.waiting

    def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("refuse", [False, True])
def test_a_failed_transfer_ends_the_load_with_its_error(tmp_path: Path, refuse: bool) -> None:
    workload = block_load("x", 100, MIB, 4)
    with open_target(tmp_path, FILE_NBYTES) as target:
        backend = _Backend(refuse=refuse)
        memories = [memoryview(bytearray(MIB)) for _ in range(4)]
        load = Load(backend, target, Schedule.of(workload, FILE_NBYTES), memories, seconds=60.0)
        load.start()
        first, *others = backend.waiting
        first.ticket.set_exception(IoError(path="p", offset=0, nbytes=1, errno=5, key="k"))
        assert not load.ended.done  # the others are still in flight
        for request in others:
            request.ticket.set_done()
        assert load.ended.done
        with pytest.raises((IoError, ClosedError)):
            load.ended.result()
        assert len(backend.waiting) == (2 if refuse else 4)  # nothing is submitted after a failure


def test_aiofiles_engine_reports_a_file_that_is_too_short(tmp_path: Path) -> None:
    file = tmp_path / "short"
    file.write_bytes(bytes(100))
    backend = AiofilesBackend(tasks=1)
    try:
        request = IoRequest(Op.READ, -1, str(file), 0, memoryview(bytearray(4096)), 1, "k")  # type: ignore[arg-type]
        backend.submit(request)
        assert request.ticket.wait(100)
        with pytest.raises(IoError):
            request.ticket.result()
        assert backend.in_flight() == []
    finally:
        backend.close()
    with pytest.raises(ClosedError):
        backend.submit(request)


def test_two_drives_are_measured_alone_and_together(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir(), second.mkdir()
    result = run_tier(_options(first, second, engines=(BenchEngine.BUFFERED,)), _quiet)
    groups = list(dict.fromkeys(series.directories for series in result.series))
    assert groups == [(str(first),), (str(second),), (str(first), str(second))]
    assert [list(folder.iterdir()) for folder in (first, second)] == [[], []]
    written = sum(run.moved_nbytes[Op.WRITE] for series in result.series for run in series.runs)
    assert result.written_nbytes == written + 2 * FILE_NBYTES


def test_without_direct_io_the_page_cache_is_measured_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.backends.probe.probe_direct", lambda _: "it is refused")
    result = run_tier(_options(tmp_path), _quiet)
    assert {series.engine for series in result.series} == {BenchEngine.BUFFERED}
    assert any("engine direct was not measured" in note for note in result.notes)
    assert 'engine = "buffered"' in to_json(result)["config"]
    every = (BenchEngine.DIRECT, BenchEngine.AIO, BenchEngine.BUFFERED)
    result = run_tier(_options(tmp_path, engines=every), _quiet)
    assert [series.engine for series in result.series] == [BenchEngine.BUFFERED] * len(SHORT.workloads)  # once
    monkeypatch.setattr(fio, "find_fio", lambda: "fio")
    with open_target(tmp_path, FILE_NBYTES) as target, pytest.raises(ConfigError, match="it is refused"):
        fio.compare(comparison(), target, repeats=1, seconds=0.1, setup=fio.FioSetup(), progress=_quiet)


def test_a_file_too_small_for_a_part_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    told: list[str] = []
    large = Profile("large", "", (block_load("large", 100, 8 * MIB, 16),))
    with pytest.raises(ConfigError, match=r"too small for 'large'.*--size must be at least 256 MiB"):
        run_tier(_options(tmp_path, profiles=(SHORT, large)), told.append)
    assert told == []
    assert list(tmp_path.iterdir()) == []


def test_a_directory_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="given twice"):
        run_tier(_options(tmp_path, tmp_path / "." / "x" / ".."), _quiet)


_FAKE_FIO = """#!{python}
import json, os, sys
if "--version" in sys.argv:
    print("fio-9.9")
    sys.exit(0)
with open({log!r}, "a") as log:
    log.write(json.dumps([*sys.argv[1:], os.environ.get("GLIBC_TUNABLES", "")]) + "\\n")
if {fails}:
    sys.exit("no such ioengine")
job = {{"read": {{"bw_bytes": 1000000, "io_bytes": 500000}}, "write": {{"bw_bytes": 0, "io_bytes": 1000}},
        "usr_cpu": 10.0, "sys_cpu": 30.0, "job_runtime": 500}}
print("fio: a warning")
print(json.dumps({{"fio version": "fio-9.9", "jobs": [job]}}))
"""


def _fake_fio(folder: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> Path:
    """A program called fio that writes down how it was called."""
    program, log = folder / "fio", folder / "calls"
    program.write_text(_FAKE_FIO.format(python=sys.executable, log=str(log), fails=fails))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return log


def test_fio_takes_turns_on_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swap, programs = tmp_path / "swap", tmp_path / "programs"
    swap.mkdir(), programs.mkdir()
    if not _is_direct(swap):
        pytest.skip("no direct I/O here")
    log = _fake_fio(programs, monkeypatch)
    compared = {"comparison": comparison(MIB, 4), "comparison_repeats": 3, "comparison_engine": BenchEngine.DIRECT}
    options = _options(swap, profiles=(), **compared)
    result = run_tier(options, _quiet)
    calls = log.read_text().splitlines()
    trials = 3 * 2 * 3  # of each mix, twice, every way to run fio
    assert len(calls) == trials + 9
    assert all('"--bs=1048576"' in call and "bench.data" in call for call in calls)
    deep = [call for call in calls if "psync" not in call]
    assert all('"--iodepth=4"' in call and f"--size={FILE_NBYTES}" in call for call in deep)
    assert all("hugetlb=1" in call for call in deep)
    assert len(calls) - len(deep) == 6  # only tried: all are equally fast, and the first one is taken
    ours = sum(run.moved_nbytes[Op.WRITE] for series in result.series for run in series.runs)
    assert result.written_nbytes == FILE_NBYTES + ours + 1000 * len(calls)
    report = to_json(result)["compare_fio"]
    assert (report["fio_version"], report["directory"]) == ("fio-9.9", str(swap))
    for name in ("read", "write", "mixed"):
        assert report[name]["fio"] == 1_000_000
        assert (report[name]["fio_engine"], report[name]["fio_huge_pages"]) == ("libaio", True)
        assert report[name]["ratio"] == pytest.approx(report[name]["ours"] / 1_000_000)
        assert report[name]["fio_cpu_s_per_gb"] == pytest.approx(0.4 * 0.5 / 501_000 * 1e9)
        assert len(report[name]["ours_values"]) == 3
    assert "taking turns" not in to_html(result)
    assert "Beside fio-9.9" in to_html(result)


def test_of_the_ways_to_run_fio_the_fastest_that_works_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"libaio": 2.0, "psync": 5.0}

    def run(workload: Workload, target: object, seconds: float, setup: fio.FioSetup) -> fio.FioRun:
        if setup.engine not in rates:
            raise InfinityError(f"fio: {setup.engine} is not available")
        return fio.FioRun(rates[setup.engine], 0.0, 1.0, 1, 0)

    monkeypatch.setattr(fio, "run_fio", run)
    workload = block_load("x", 100, MIB, 4)
    with open_target(tmp_path, FILE_NBYTES) as target:
        assert fio.try_setups(workload, target, 1.0).best == fio.FioSetup("psync")
        rates["io_uring"] = 6.0
        assert fio.try_setups(workload, target, 1.0).best == fio.FioSetup("io_uring", huge_pages=True)
        rates.clear()
        with pytest.raises(InfinityError, match="psync is not available"):
            fio.try_setups(workload, target, 1.0)


def test_what_finding_our_best_engine_writes_is_counted(tmp_path: Path) -> None:
    if not _is_direct(tmp_path):
        pytest.skip("no direct I/O here")
    with open_target(tmp_path, FILE_NBYTES) as target:
        engine, written_nbytes = fio.best_engine(block_load("x", 0, MIB, 4), target, 0.1)
        assert engine in (BenchEngine.DIRECT, BenchEngine.AIO)
        assert written_nbytes > 0 or why_not() is not None
        assert fio.best_engine(block_load("x", 100, MIB, 4), target, 0.1)[1] == 0


def test_fio_that_fails_says_how_it_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_fio(tmp_path, monkeypatch, fails=True)
    with (
        open_target(tmp_path, FILE_NBYTES) as target,
        pytest.raises(InfinityError, match=r"no such ioengine\ncommand: .*--rw=read"),
    ):
        fio.run_fio(block_load("x", 100, MIB, 4), target, 0.1, fio.FioSetup())


def test_threaded_fio_engines_get_threads_instead_of_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = _fake_fio(tmp_path, monkeypatch)
    with open_target(tmp_path, FILE_NBYTES) as target:
        fio.run_fio(block_load("x", 50, MIB, 4), target, 0.1, fio.FioSetup("psync"))
    call = log.read_text()
    assert all(part in call for part in ("--numjobs=4", "--iodepth=1", f"--offset_increment={8 * MIB}", "--rw=rw"))


def test_fio_gets_huge_pages_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = _fake_fio(tmp_path, monkeypatch)
    with open_target(tmp_path, FILE_NBYTES) as target:
        for huge_pages in (False, True):
            fio.run_fio(block_load("x", 0, MIB, 4), target, 0.1, fio.FioSetup(huge_pages=huge_pages))
    assert ["hugetlb=1" in call for call in log.read_text().splitlines()] == [False, True]


def test_fio_output_that_is_none() -> None:
    for text in ("", "{}", '{"jobs": [{}]}', "no json"):
        with pytest.raises(InfinityError, match="could not be read"):
            fio.parse(text)


def test_fio_that_moves_nothing_is_told() -> None:
    part = {"bw_bytes": 0, "io_bytes": 0}
    job = {"read": part, "write": part, "usr_cpu": 1.0, "sys_cpu": 1.0, "job_runtime": 50}
    with pytest.raises(InfinityError, match="moved no bytes in the time"):
        fio.parse(json.dumps({"jobs": [job]}))


def test_without_fio_the_message_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt install fio"):
        run_tier(_options(tmp_path, comparison=comparison()), _quiet)


def test_sustained_write_moves_what_it_said(tmp_path: Path) -> None:
    points = []
    found = write_sustained(tmp_path, 96 * MIB, interval_s=0.01, watch=points.append)
    assert found.written_nbytes == 96 * MIB
    assert list(found.points) == points
    assert all(a.at_s < b.at_s and a.written_nbytes <= b.written_nbytes for a, b in itertools.pairwise(points))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="too little"):
        write_sustained(tmp_path, MIB, watch=points.append)


def test_memory_and_kernels_are_measured_alone_and_beside_the_drive(tmp_path: Path) -> None:
    with open_target(tmp_path, 128 * MIB) as target:
        report, written_nbytes = measure_memory(target, repeats=1, seconds=0.0, progress=_quiet)
    rates = {(rate.name, rate.threads): rate for rate in report.rates}
    assert {name for name, _ in rates} >= {"host memory copy", "xxh3 checksum", "AdamW fp32", "AdamW bf16"}
    assert written_nbytes > 0
    for rate in rates.values():
        assert rate.unit == ("parameters/s" if rate.name.startswith("AdamW") else "bytes/s")
        assert rate.beside_disk is not None
        assert min(rate.alone.median, rate.beside_disk.median) > 0
    if not torch.cuda.is_available():
        assert "host to device: not measured" in report.notes[0]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> BenchResult:
    folder = tmp_path_factory.mktemp("result")
    return run_tier(
        _options(folder, engines=(BenchEngine.DIRECT, BenchEngine.BUFFERED), sustained_nbytes=64 * MIB), _quiet
    )


def test_json_has_the_shape_of_fio(result: BenchResult) -> None:
    report = to_json(result)
    assert {"fio version", "timestamp", "time", "global options", "jobs", "disk_util"} <= set(report)
    for job in report["jobs"]:
        assert {"jobname", "job options", "usr_cpu", "sys_cpu", "latency_ns", "latency_us", "latency_ms"} <= set(job)
        assert {"rw", "bs", "iodepth", "numjobs", "ioengine", "direct"} <= set(job["job options"])
        for kind in ("read", "write"):
            part = job[kind]
            if not part["total_ios"]:
                continue
            assert part["bw"] == pytest.approx(part["bw_bytes"] / 1024, abs=1)
            assert part["iops"] * int(job["job options"]["bs"]) == pytest.approx(part["bw_bytes"], rel=0.01)
            assert part["io_bytes"] == part["total_ios"] * int(job["job options"]["bs"])
            assert next(iter(part["clat_ns"]["percentile"])) == "1.000000"
            assert part["lat_ns"]["N"] == part["total_ios"]
    assert report["sustained"][0]["written_nbytes"] == 64 * MIB
    assert "compare_fio" not in report


def test_every_workload_has_a_file_of_its_own(result: BenchResult) -> None:
    files = to_files(result)
    assert len(files) == len(result.series)
    assert all(len(report["jobs"]) == 1 for report in files.values())


class _Page(HTMLParser):
    """Collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {name}" for name, value in attributes if name in ("src", "href") and value]
        self.loads += [tag] if tag in ("script", "link", "iframe", "object") else []


def test_page_needs_nothing_else(result: BenchResult) -> None:
    text = to_html(result)
    page = _Page()
    page.feed(text)
    assert page.loads == []
    for part in text.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>")
    assert "Sustained write" in text
