"""The record of a run, and stock fio replaying it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from storage.backends.recording import IoLog
from storage.pool import HostPool
from storage.store import ShardStore, StorageOptions
from storage.types import TrafficTag

MIB = 1 << 20
TAG = TrafficTag("param", 0)


def record(folder: Path, drives: int = 1) -> tuple[Path, Counter[str]]:
    """A few transfers through a real store; the trace, and the bytes moved by direction."""
    paths = [folder / f"swap{number}" for number in range(drives)]
    for path in paths:
        path.mkdir()
    trace = folder / "run.iolog"
    log = IoLog(trace)
    moved: Counter[str] = Counter()
    options = StorageOptions(block_nbytes=MIB, calibrate="off", checksum="none")
    with HostPool(8 * MIB).lease(2 * MIB, "test") as lease:
        store = ShardStore.open(paths, 16 * MIB, options=options, wrap_backend=log.wrap)
        try:
            for key in "abc":
                store.create(key, 2 * MIB)
                store.submit_write(key, lease.memory, tag=TAG).wait(100)
                store.submit_read(key, lease.memory[:MIB], tag=TAG).wait(100)
                moved.update(write=2 * MIB, read=MIB)
        finally:
            store.close()
            log.close()
    return trace, moved


def lines_of(trace: Path) -> list[list[str]]:
    header, *lines = trace.read_text().splitlines()
    assert header == "fio version 3 iolog"
    return [line.split() for line in lines]


@pytest.mark.parametrize("drives", [1, 2])
def test_every_transfer_is_noted_in_the_order_of_time(tmp_path: Path, drives: int) -> None:
    trace, moved = record(tmp_path, drives)
    lines = lines_of(trace)
    noted: Counter[str] = Counter()
    for line in lines:
        if line[2] in ("read", "write"):
            noted[line[2]] += int(line[4])
    assert noted == moved
    times = [int(line[0]) for line in lines]
    assert times == sorted(times)
    names = {line[1] for line in lines}
    assert names == {f"drive{number}.dat" for number in range(drives)}
    for name in names:
        actions = [line[2] for line in lines if line[1] == name]
        assert actions[:2] == ["add", "open"]
        assert actions[-1] == "close"


def test_what_comes_after_the_end_is_not_noted(tmp_path: Path) -> None:
    log = IoLog(tmp_path / "t.iolog")
    log.close()
    log.close()
    assert lines_of(tmp_path / "t.iolog") == []


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
@pytest.mark.parametrize("drives", [1, 2])
def test_fio_accepts_a_trace_and_moves_the_same_bytes(tmp_path: Path, drives: int) -> None:
    trace, moved = record(tmp_path, drives)
    target = tmp_path / "other"
    target.mkdir()
    command = ["fio", "--name=replay", f"--read_iolog={trace}", "--size=16m", "--replay_no_stall=1"]
    done = subprocess.run(
        [*command, "--ioengine=psync", "--output-format=json"],
        cwd=target,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    assert {op: job[op]["io_bytes"] for op in ("read", "write")} == moved
    assert {file.name for file in target.iterdir()} == {f"drive{number}.dat" for number in range(drives)}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_trace_that_cannot_be_written_ends_and_the_transfers_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = IoLog(Path("/dev/full"))
    with HostPool(MIB).lease(4096, "test") as lease:
        store = ShardStore.open([tmp_path], MIB, options=StorageOptions(calibrate="off"), wrap_backend=log.wrap)
        store.create("a", 4096)
        for _ in range(1000):  # more than is written at once
            ticket = store.submit_write("a", lease.memory, tag=TAG)
            assert ticket.wait(100)
            ticket.result()
        store.close()
        log.close()
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == "the trace /dev/full is not complete: No space left on device. The transfers go on"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_trace_that_cannot_be_ended_is_told(caplog: pytest.LogCaptureFixture) -> None:
    log = IoLog(Path("/dev/full"))
    log.close()
    log.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the trace /dev/full is not complete: No space left on device. The transfers go on"
    ]
