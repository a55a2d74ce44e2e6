"""Calibration: what is chosen of what was measured, what is kept, and that nothing is left behind."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from storage import calibration, calibration_cache, devices, drives
from storage.backends import probe
from storage.backends.probe import Engine
from storage.calibration import (
    MOST_WRITTEN_NBYTES,
    Calibration,
    EngineTrial,
    Trial,
    calibrate,
    choose,
    choose_by_cost,
    explain,
    explain_engine,
)
from storage.calibration_cache import Calibrate, CalibrationCache, default_folder, find_calibration, speeds_of
from storage.cleanup import find_run_folders, remove_dead
from storage.devices import describe_device, disk_of, identify_device
from storage.drives import DEFAULT_BLOCK_NBYTES, DEFAULT_THREADS, StorageOptions, choose_tuning
from storage.errors import StorageError, SwapFullError
from storage.filesystems import Mount
from tests.storage.helpers import MIB, WAIT_S, run_threads

ROOT = Path(__file__).parents[2]
_DAY_S = 86400.0
_FOUND = Calibration("drive", "direct", 2 * MIB, 6, 3e9, 1e9, "because", measured_s=100.0)


@pytest.fixture
def cache(tmp_path: Path) -> CalibrationCache:
    return CalibrationCache(tmp_path / "cache", now_s=lambda: 100.0 + _DAY_S)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same measurement with fewer bytes."""
    for name, value in {"_FILE_NBYTES": 64 * MIB, "_TRIAL_NBYTES": 64 * MIB, "_ROUNDS": 1}.items():
        monkeypatch.setattr(calibration, name, value)
    monkeypatch.setattr(calibration, "_SETTINGS", ((MIB, 4), (4 * MIB, 2)))


# The choice ------------------------------------------------------------------------------------------------------


def test_the_cheapest_of_the_fast_ones_is_chosen() -> None:
    trials = [Trial(MIB, 4, 2.0e9), Trial(MIB, 16, 2.9e9), Trial(4 * MIB, 4, 2.95e9), Trial(4 * MIB, 8, 3.0e9)]
    assert choose(trials) is trials[2]  # as many bytes in flight as 1 MiB × 16, on fewer threads
    assert explain(choose(trials), trials, 2.9e9, 1.8e9) == (
        "4 MiB × 4 threads: 2.90 GB/s read, 1.80 GB/s write; 4 MiB × 8 threads gave +2%"
    )


def test_noise_does_not_buy_memory() -> None:
    trials = [Trial(MIB, 4, 0.96e9), Trial(4 * MIB, 8, 1.0e9)]
    assert choose(trials) is trials[0]
    assert choose([replace(trials[0], nbytes_per_s=0.94e9), trials[1]]) == trials[1]


def test_one_setting_alone() -> None:
    only = Trial(MIB, 4, 1e8)
    assert choose([only]) is only
    assert explain(only, [only], 1e8, 5e7) == "1 MiB × 4 threads: 0.10 GB/s read, 0.05 GB/s write"


def test_the_engine_that_costs_less_is_chosen_when_it_is_as_fast() -> None:
    threads, kernel = EngineTrial(Engine.DIRECT, 3.0e9, 0.030), EngineTrial(Engine.AIO, 2.9e9, 0.013)
    assert choose_by_cost([threads, kernel]) is kernel
    assert explain_engine(kernel, [threads, kernel]) == (
        "engine aio (direct 3.00 GB/s at 0.030 CPU s/GB, aio 2.90 GB/s at 0.013 CPU s/GB)"
    )


def test_a_slower_engine_is_not_chosen_however_little_it_costs() -> None:
    threads, kernel = EngineTrial(Engine.DIRECT, 3.0e9, 0.030), EngineTrial(Engine.AIO, 2.8e9, 0.001)
    assert choose_by_cost([threads, kernel]) is threads


# The measurement -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("can_direct", "quick")
def test_a_real_drive(tmp_path: Path) -> None:
    found = calibrate(tmp_path)
    assert (found.block_nbytes, found.threads) in calibration._SETTINGS
    assert found.read_nbytes_per_s > 0 < found.write_nbytes_per_s
    assert found.device == identify_device(tmp_path)
    assert found.best_engine in ("direct", "aio")
    assert f"; engine {found.best_engine} (direct " in found.reason
    assert found.reason.startswith(f"{found.block_nbytes // MIB} MiB × {found.threads} threads: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("can_direct", "quick")
def test_threads_alone_are_tried_where_the_kernel_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "why_not", lambda: "the kernel refuses")
    found = calibrate(tmp_path)
    assert found.best_engine == "direct"
    assert "aio" not in found.reason


@pytest.mark.usefixtures("can_direct")
def test_the_bytes_written_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    real = os.pwritev

    def count(fd: int, buffers: list[memoryview], offset: int) -> int:
        written.append(real(fd, buffers, offset))
        return written[-1]

    monkeypatch.setattr(calibration, "make_backend", lambda engine, **how: _backend(count, **how))
    calibrate(tmp_path)
    assert 0 < sum(written) <= MOST_WRITTEN_NBYTES


def _backend(pwritev: object, **how: int) -> object:
    from storage.backends.direct import DirectBackend
    from storage.backends.system import SystemCalls

    return DirectBackend(calls=SystemCalls(pwritev=pwritev), **how)  # type: ignore[arg-type]


@pytest.mark.usefixtures("can_direct", "quick")
def test_an_error_of_the_drive_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(calibration, "make_backend", lambda engine, **how: _backend(broken, **how))
    with pytest.raises(StorageError, match="calibration"):
        calibrate(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("can_direct")
def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"total": 1 << 40, "free": 1 << 30})
    monkeypatch.setattr(calibration.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(SwapFullError, match="only 1073741824 bytes are free"):
        calibrate(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_page_cache_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.backends.probe.probe_direct", lambda _: "it is refused")
    with pytest.raises(StorageError, match="cannot be calibrated: it is refused"):
        calibrate(tmp_path)
    assert list(tmp_path.iterdir()) == []


_ENDLESS = """
import sys
from pathlib import Path
from storage import calibration
calibration._TRIAL_S = calibration._FILL_S = 1e9
calibration._FILE_NBYTES, calibration._TRIAL_NBYTES = 64 << 20, 1 << 60
real = calibration._Drive._rate
def rate(self, *args):
    print("measuring", flush=True)
    return real(self, *args)
calibration._Drive._rate = rate
calibration.calibrate(Path(sys.argv[1]))
"""


@pytest.mark.usefixtures("can_direct")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_measurement_that_is_stopped(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _ENDLESS, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"measuring\n"
        process.send_signal(number)
        process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    if number is signal.SIGKILL:
        (folder,) = find_run_folders(tmp_path)  # what `infinity clean` removes
        assert not folder.is_alive
        remove_dead(tmp_path)
    assert list(tmp_path.iterdir()) == []


# The cache -------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_found_again(cache: CalibrationCache) -> None:
    assert cache.find("drive", "direct") is None
    path = cache.keep(_FOUND)
    assert cache.find("drive", "direct") == _FOUND
    assert list(cache.folder.iterdir()) == [path]
    assert json.loads(path.read_text()) == asdict(_FOUND)
    newer = replace(_FOUND, threads=8)
    cache.keep(newer)
    assert cache.find("drive", "direct") == newer


def test_other_drives_engines_procedures_and_times_count_as_nothing(cache: CalibrationCache) -> None:
    cache.keep(_FOUND)
    assert cache.find("another drive", "direct") is None
    assert cache.find("drive", "buffered") is None
    for days, is_good in ((89, True), (91, False), (-1, False)):
        later = CalibrationCache(cache.folder, now_s=lambda days=days: 100.0 + days * _DAY_S)  # type: ignore[misc]
        assert (later.find("drive", "direct") is not None) == is_good
    path = cache.path_of("drive", "direct")
    settings = ({"block_nbytes": 1000}, {"threads": 0}, {"threads": 10**6}, {"best_engine": "x"})
    for change in ({"device": "moved"}, {"procedure": 0}, *settings):
        path.write_text(json.dumps(asdict(_FOUND) | change))
        assert cache.find("drive", "direct") is None, change


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"device": 3}', b"\xff\xfe", b'{"threads": "6"}'])
def test_a_damaged_file_is_ignored_and_replaced(
    cache: CalibrationCache, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = cache.path_of("drive", "direct")
    cache.folder.mkdir()
    path.write_bytes(content)
    assert cache.find("drive", "direct") is None
    assert f"{path} is ignored, it is damaged" in caplog.text
    cache.keep(_FOUND)
    assert cache.find("drive", "direct") == _FOUND


def test_writers_at_the_same_time_leave_one_whole_result(cache: CalibrationCache) -> None:
    def write(number: int) -> None:
        for _ in range(20):
            cache.keep(replace(_FOUND, threads=number + 1, reason="x" * 5000 * number))
            assert cache.find("drive", "direct") is not None

    run_threads(4, write)
    assert len(list(cache.folder.iterdir())) == 1


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "infinity" / "drives"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "infinity" / "drives"


# When it is measured ---------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The directories that were measured."""
    directories: list[Path] = []

    def measure(directory: Path) -> Calibration:
        directories.append(directory)
        return replace(_FOUND, device=identify_device(directory))

    monkeypatch.setattr(calibration_cache, "calibrate", measure)
    yield directories


def test_a_drive_is_measured_only_when_asked_for_and_once(
    cache: CalibrationCache, measured: list[Path], tmp_path: Path
) -> None:
    for mode in (Calibrate.OFF, Calibrate.CACHED):
        assert find_calibration(tmp_path, "direct", mode, cache) is None
    assert find_calibration(tmp_path, "buffered", Calibrate.MISSING, cache) is None
    assert measured == []
    for mode in (Calibrate.MISSING, Calibrate.MISSING, Calibrate.CACHED):
        found = find_calibration(tmp_path, "direct", mode, cache)
        assert found is not None
        assert found.threads == 6
    assert measured == [tmp_path]
    assert find_calibration(tmp_path, "direct", Calibrate.OFF, cache) is None


def test_of_several_that_start_at_once_one_measures(
    cache: CalibrationCache, measured: list[Path], tmp_path: Path
) -> None:
    found: list[object] = []
    run_threads(4, lambda _: found.append(find_calibration(tmp_path, "direct", Calibrate.MISSING, cache)))
    assert len(measured) == 1
    assert len(found) == 4 and None not in found


def test_who_waits_too_long_goes_on_without(
    cache: CalibrationCache, measured: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_cache, "_LOCK_TIMEOUT_S", 0.0)
    with cache.measuring(identify_device(tmp_path), "direct") as is_mine:
        assert is_mine
        assert find_calibration(tmp_path, "direct", Calibrate.MISSING, cache) is None
    assert measured == []


def test_a_drive_that_cannot_be_measured_is_used_all_the_same(
    cache: CalibrationCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(directory: Path) -> Calibration:
        raise SwapFullError("too little room", path=str(directory))

    monkeypatch.setattr(calibration_cache, "calibrate", refuse)
    assert find_calibration(tmp_path, "direct", Calibrate.MISSING, cache) is None
    assert "was not calibrated: too little room" in caplog.text


def test_a_cache_that_cannot_be_written_loses_only_the_next_start(
    measured: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    unusable = CalibrationCache(tmp_path / "file" / "below")
    assert find_calibration(tmp_path, "direct", Calibrate.MISSING, unusable) is None
    assert "was not calibrated" in caplog.text


def test_settings_come_from_the_user_then_the_drive_then_the_defaults(tmp_path: Path) -> None:
    defaults = (DEFAULT_BLOCK_NBYTES, DEFAULT_THREADS)

    def tuned(**given: object) -> tuple[int, int]:  # blocks and threads
        tuning = choose_tuning(tmp_path, Engine.DIRECT, StorageOptions(**given))  # type: ignore[arg-type]
        return tuning.block_nbytes, tuning.threads

    assert tuned() == defaults
    path = CalibrationCache().keep(
        replace(_FOUND, device=identify_device(tmp_path), measured_s=os.stat(tmp_path).st_mtime)
    )
    try:
        assert tuned() == (2 * MIB, 12)  # as many again for those between blocks
        assert tuned(calibrate="off") == defaults
        assert tuned(threads=1) == (DEFAULT_BLOCK_NBYTES, 1)
        assert tuned(block_nbytes=MIB) == (MIB, DEFAULT_THREADS)
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("read_nbytes_per_s", "threads"),
    [(200e6, 4), (1.0e9, 5), (2.0e9, 6), (7.0e9, 8)],  # 0.2, 1.2, 2.4 and 8.3 blocks of 4 MiB in 5 ms
)
def test_a_fast_drive_has_workers_for_those_that_wait_for_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_nbytes_per_s: float, threads: int
) -> None:
    monkeypatch.setattr(drives.sys, "getswitchinterval", lambda: 0.005)
    found = replace(
        _FOUND,
        device=identify_device(tmp_path),
        measured_s=os.stat(tmp_path).st_mtime,
        block_nbytes=4 * MIB,
        threads=4,
        read_nbytes_per_s=read_nbytes_per_s,
    )
    path = CalibrationCache().keep(found)
    try:
        tuning = choose_tuning(tmp_path, Engine.DIRECT, StorageOptions())
    finally:
        path.unlink()
    assert (tuning.block_nbytes, tuning.threads) == (4 * MIB, threads)
    assert ("more threads" in tuning.reason) == (threads > 4)


def test_the_engine_that_was_found_best_is_what_auto_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(wanted: str) -> Engine:
        return choose_tuning(tmp_path, Engine.DIRECT, StorageOptions(engine=wanted)).engine

    measured_s = os.stat(tmp_path).st_mtime
    path = CalibrationCache().keep(
        replace(_FOUND, device=identify_device(tmp_path), measured_s=measured_s, best_engine="aio")
    )
    try:
        monkeypatch.setattr(drives, "why_not", lambda: None)
        assert engine("auto") is Engine.AIO
        assert engine("direct") is Engine.DIRECT  # who insists gets it, with the settings that were measured
        monkeypatch.setattr(drives, "why_not", lambda: "the kernel refuses")  # measured on another kernel
        assert engine("auto") is Engine.DIRECT
    finally:
        path.unlink()


@pytest.mark.usefixtures("can_direct")
def test_where_the_kernel_has_no_room_for_the_best_engine_auto_takes_the_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from storage.store import ShardStore

    def refuse(**settings: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    found = replace(_FOUND, device=identify_device(tmp_path), measured_s=os.stat(tmp_path).st_mtime, best_engine="aio")
    path = CalibrationCache().keep(found)
    try:
        monkeypatch.setattr(drives, "why_not", lambda: None)
        monkeypatch.setattr(probe, "why_not", lambda: None)
        monkeypatch.setattr(probe, "AioBackend", refuse)
        store = ShardStore.open([tmp_path], MIB, options=StorageOptions(free_margin_nbytes=0))
        assert store.engine_name.startswith("direct ")
        store.close()
        assert "Raise fs.aio-max-nr (sysctl), which all processes share, or use 'direct'. Threads are" in caplog.text
        with pytest.raises(StorageError, match=r"Raise fs\.aio-max-nr"):
            ShardStore.open([tmp_path], MIB, options=StorageOptions(free_margin_nbytes=0, engine="aio"))
    finally:
        path.unlink()


@pytest.mark.usefixtures("can_direct")
def test_a_store_uses_and_logs_what_was_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from storage.store import ShardStore

    path = CalibrationCache().keep(
        replace(_FOUND, device=identify_device(tmp_path), measured_s=os.stat(tmp_path).st_mtime)
    )
    try:
        with caplog.at_level(logging.INFO):
            store = ShardStore.open([tmp_path], MIB, options=StorageOptions(free_margin_nbytes=0))
        workers = [thread for thread in threading.enumerate() if thread.name.startswith("infinity-io-")]
        assert len(workers) == 12  # six, and as many for those between blocks
        store.close()
        assert next(message for message in caplog.messages if message.startswith("files in")).split("), ")[1] == (
            "because; 6 more threads, for those that wait for a core"
        )
    finally:
        path.unlink()


# Speeds, for shares ----------------------------------------------------------------------------------------------


def test_speeds_are_known_when_every_drive_was_measured(
    cache: CalibrationCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_cache, "identify_device", lambda directory: directory.name)
    cache.keep(replace(_FOUND, device="a"))
    assert speeds_of([tmp_path / "a", tmp_path / "b"], cache) is None
    cache.keep(replace(_FOUND, device="b", read_nbytes_per_s=1e9, write_nbytes_per_s=1e9))
    assert speeds_of([tmp_path / "a", tmp_path / "b"], cache) == pytest.approx([1.5e9, 1e9])  # half is read


# Names of drives -------------------------------------------------------------------------------------------------


def _disk(root: Path, monkeypatch: pytest.MonkeyPatch, number: int, **files: str) -> Path:
    """A disk in a recorded /sys/dev/block, and a partition of it that has `number`."""
    disk = root / "devices" / "nvme0n1"
    (disk / "queue").mkdir(parents=True)
    for name, text in files.items():
        file = disk / name.replace("__", "/")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text + "\n")
    partition = disk / "nvme0n1p1"
    partition.mkdir()
    (root / "block").mkdir()
    (root / "block" / f"{os.major(number)}:{os.minor(number)}").symlink_to(partition)
    monkeypatch.setattr(devices, "_BLOCK_DEVICES", root / "block")
    return disk


def test_a_drive_is_known_by_its_own_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = tmp_path.stat().st_dev
    _disk(tmp_path, monkeypatch, number, size="2000", device__model="Fast  1TB", wwid="eui.0025", serial="S1")
    assert identify_device(tmp_path) == "Fast 1TB eui.0025 2000 sectors"


def test_a_drive_without_a_number_is_known_by_its_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = tmp_path.stat().st_dev
    _disk(tmp_path, monkeypatch, number, size="2000")
    monkeypatch.setattr(devices, "_uuid_of", lambda wanted: "0-1-2" if wanted == number else None)
    assert identify_device(tmp_path) == "file system 0-1-2"


def test_people_know_a_drive_by_its_model_and_the_kernel_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = tmp_path.stat().st_dev
    disk = _disk(tmp_path, monkeypatch, number, size="2000", serial="overlayblk")
    assert disk_of(tmp_path) == disk
    assert describe_device(tmp_path) == f"drive nvme0n1 under {tmp_path}"
    (disk / "device").mkdir()
    (disk / "device" / "model").write_text("Fast  1TB \n")
    assert describe_device(tmp_path / "not yet there") == f"Fast 1TB (nvme0n1) under {tmp_path}/not yet there"


def test_the_disk_of_a_file_system_with_a_number_of_its_own_is_what_it_is_mounted_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of btrfs: bytes that its drive counts were not looked at."""
    null = os.stat("/dev/null").st_rdev
    disk = _disk(tmp_path, monkeypatch, null, size="2000", serial="S1")
    monkeypatch.setattr(devices, "find_mount", lambda _: Mount(1, None, Path("/"), "btrfs", "/dev/null"))
    assert disk_of(tmp_path) == disk
    assert identify_device(tmp_path) == "S1 2000 sectors"


def test_what_is_no_drive_is_called_by_its_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_BLOCK_DEVICES", tmp_path / "none")
    assert disk_of(tmp_path) is None
    monkeypatch.setattr(devices, "find_mount", lambda _: Mount(1, None, Path("/"), "nfs4", "server:/export"))
    assert describe_device(tmp_path) == f"nfs4 file system under {tmp_path}"


@pytest.mark.parametrize(
    ("mount", "name"),
    [
        (Mount(1, None, Path("/"), "nfs4", "server:/export"), "nfs4 server:/export"),
        (Mount(1, None, Path("/"), "zfs", "tank/swap"), "zfs tank/swap"),
        (Mount(1, None, Path("/"), "tmpfs", "tmpfs"), "of boot"),
        (None, "of boot"),
    ],
)
def test_what_is_no_block_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: Mount | None, name: str
) -> None:
    monkeypatch.setattr(devices, "_BLOCK_DEVICES", tmp_path / "none")
    monkeypatch.setattr(devices, "find_mount", lambda _: mount)
    assert name in identify_device(tmp_path)


def test_this_machine_gives_the_same_name_twice(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    assert identify_device(tmp_path) == identify_device(tmp_path / "below") == identify_device(tmp_path / "not" / "yet")
