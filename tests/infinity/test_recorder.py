"""A loop of one's own, recorded: wear is counted, and training outlives a record that cannot be written."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import infinity
from infinity.observe.exporters import MetricsLog
from infinity.plan.ledger import WearLedger
from infinity.replacing import replaced_file
from infinity.report.record import RunRecord, RunState
from infinity.report.recorder import RunRecorder
from infinity.wear import WearWatch
from storage.backends.base import Backend
from storage.backends.faulty import Fault, FaultyBackend
from storage.devices import identify_device
from storage.errors import StorageError
from storage.types import Op
from tests.conftest import small_config
from tests.full_disk import full_disk
from tests.infinity.test_bridge import config, train
from tests.zoo import Net, build


def test_what_a_recorded_loop_writes_is_in_the_record_and_once_in_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a `WearWatch` counts beside it, and over state alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    swap = tmp_path / "swap"
    swap.mkdir()
    model = build(Net)
    with infinity.AdamW(model.parameters(), lr=1e-2, config=config(swap)) as optimizer:
        assert optimizer.state_tier is not None and optimizer.state_tier.store is not None
        with RunRecorder(optimizer, tmp_path / "run") as recorder:
            recorder.step(loss=train(model, optimizer, range(1))[0])
        written = optimizer.state_tier.store.drive_report()[0].write.nbytes
    device = identify_device(swap)
    assert WearLedger().written_nbytes(device) == written > 0
    (told,) = RunRecord.load(tmp_path / "run").run["wear"]
    assert (told["device"], told["ledger_nbytes"]) == (device, written)
    model = build(Net)
    with infinity.offload(model, small_config(tmp_path)) as engine, WearWatch(engine) as wear:
        of_engine = infinity.AdamW(model.parameters())
        with RunRecorder(of_engine, tmp_path / "both") as recorder:
            recorder.step(loss=0.0)
            wear.step_ended()
        store = engine._runtime.store
        assert store is not None
        written += store.drive_report()[0].write.nbytes
    assert WearLedger().written_nbytes(device) == written


def test_a_record_that_is_continued_keeps_earlier_steps(tmp_path: Path) -> None:
    """Steps that come again replace those recorded before; the report tells the steps of the last process."""
    for first_step, losses in ((0, (5.0, 4.0, 3.0)), (2, (2.5, 2.0))):
        model = build(Net)
        engine = infinity.offload(model, small_config(tmp_path))
        optimizer = infinity.AdamW(model.parameters())
        with engine, RunRecorder(optimizer, tmp_path / "run", first_step=first_step) as recorder:
            for loss in losses:
                recorder.step(loss=loss)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(0, 5.0), (1, 4.0), (2, 2.5), (3, 2.0)]
    record = RunRecord.load(tmp_path / "run")
    assert [row["step"] for row in record.steps] == [2, 3]
    assert record.run["losses"] == [2.5, 2.0]


def test_the_writes_of_the_last_step_are_in_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are on their way when the block of a `WearWatch` ends."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    model = build(Net)

    def slow(backend: Backend) -> Backend:
        faulty = FaultyBackend(backend)
        faulty.inject(Fault.SLOW, op=Op.WRITE, times=None, delay_s=0.05)
        return faulty

    swap = tmp_path / "swap"
    swap.mkdir()
    with infinity.offload(model, small_config(swap, host={"budget": "300KiB"}), wrap_backend=slow) as engine:
        optimizer = infinity.AdamW(model.parameters())
        with WearWatch(engine) as wear:
            train(model, optimizer, range(2))
            wear.step_ended()
        store = engine._runtime.store
        assert store is not None
        written = store.drive_report()[0].write.nbytes
        engine.metrics()
        assert store.drive_report()[0].write.nbytes == written
    assert WearLedger().written_nbytes(identify_device(swap)) == written > 0


def test_an_engine_may_be_closed_inside_the_block_of_its_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    model = build(Net)
    engine = infinity.offload(model, small_config(tmp_path, host={"budget": "300KiB"}))
    with WearWatch(engine) as wear:
        train(model, infinity.AdamW(model.parameters()), range(1))
        wear.step_ended()
        engine.close()
    assert WearLedger().written_nbytes(identify_device(tmp_path)) > 0


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with full_disk(3), pytest.raises(OSError, match="File too large"), replaced_file(path) as file:
        file.write("too much")
    assert path.read_text() == "before"
    missing = tmp_path / "missing" / "file"
    with pytest.raises(OSError, match=f"No such file or directory: '{missing}'"), replaced_file(missing):
        pass
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_are_written_at_a_time_are_whole_and_no_other_file_is_touched(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "file.new"
    other.write_text("of somebody else")
    with replaced_file(path) as first:
        first.write("first")
        with replaced_file(path) as second:
            second.write("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert other.read_text() == "of somebody else"
    assert set(tmp_path.iterdir()) == {path, other}


def test_training_outlives_its_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build(Net)
    with infinity.offload(model, small_config(tmp_path)):
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        recorder = RunRecorder(optimizer, tmp_path / "full")
        recorder.step(loss=1.0)
        with full_disk((tmp_path / "full" / "metrics.jsonl").stat().st_size):
            recorder.step(loss=2.0)
            recorder.step(loss=3.0)
            recorder.close()
        gone = RunRecorder(optimizer, tmp_path / "gone")
        gone.step(loss=1.0)
        shutil.rmtree(tmp_path / "gone")
        gone.step(loss=2.0)
        gone.close()
        with pytest.raises(infinity.ConfigError, match=r"file.*cannot be written"):
            (tmp_path / "file").write_text("")
            RunRecorder(optimizer, tmp_path / "file")
    full, end, other = [message for message in caplog.messages if "record" in message]
    assert "ends before step 1: [Errno 27] File too large. Training goes on" in full
    assert f"{tmp_path / 'full'} is not complete" in end and f"{tmp_path / 'gone'} is not complete" in other
    record = RunRecord.load(tmp_path / "full")  # as far as there was room
    assert (record.state, record.run["losses"]) == (RunState.RUNNING, [1.0])
    assert {path.name for path in (tmp_path / "full").iterdir()} == {"run.json", "metrics.jsonl"}


def test_a_run_whose_last_writes_fail_has_failed(tmp_path: Path) -> None:
    """They fail while the recorder waits for them, when the loop is over."""
    model = build(Net)
    backends: list[FaultyBackend] = []

    def faulty(backend: Backend) -> Backend:
        backends.append(FaultyBackend(backend))
        return backends[-1]

    swap = tmp_path / "swap"
    swap.mkdir()
    settings = small_config(swap, nvme={"paths": [swap], "eio_retries": 0})
    with infinity.offload(model, settings, wrap_backend=faulty) as engine:
        optimizer = infinity.AdamW(model.parameters())
        recorder = RunRecorder(optimizer, tmp_path / "run")
        train(model, optimizer, range(1))
        engine.metrics()
        for backend in backends:
            backend.inject(Fault.IO_ERROR, op=Op.WRITE, times=None, when=lambda request: "grad" not in request.key)
        train(model, optimizer, range(1))
        recorder.step(loss=0.5)
        with pytest.raises(StorageError, match="Input/output error") as failure:
            recorder.close()
        for backend in backends:
            backend.clear()
        recorder.close()  # nothing more to say
        written = engine.counters()["nvme/write_payload_bytes"]
    record = RunRecord.load(tmp_path / "run")
    assert (record.state, record.run["losses"]) == (RunState.FAILED, [0.5])
    assert record.run["error"]["type"] == type(failure.value).__name__
    assert "Input/output error" in record.run["error"]["message"]
    assert 0 < record.run["traffic"]["total"]["nvme_write_bytes"] <= written


def test_a_loss_may_be_a_tensor_and_a_closed_recorder_says_so(tmp_path: Path) -> None:
    model = build(Net)
    with infinity.offload(model, small_config(tmp_path)) as engine:
        recorder = RunRecorder(infinity.AdamW(model.parameters()), tmp_path / "run")
        log = MetricsLog(engine, [tmp_path / "log.jsonl", tmp_path / "log.csv"])
        for loss in (torch.tensor(0.5, requires_grad=True), np.float32(0.25)):
            recorder.step(loss=loss)  # type: ignore[arg-type]
            log.step(loss=loss)  # type: ignore[arg-type]
        recorder.close()
        log.close()
        with pytest.raises(infinity.InfinityError, match="is closed"):
            recorder.step(loss=1.0)
    assert RunRecord.load(tmp_path / "run").run["losses"] == [0.5, 0.25]
    assert [json.loads(line)["loss"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [0.5, 0.25]
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [row["loss"] for row in rows] == ["0.5", "0.25"]


def test_a_record_of_an_engine_that_is_closed_ends_with_the_last_step_and_holds_no_file(tmp_path: Path) -> None:
    model = build(Net)
    with infinity.offload(model, small_config(tmp_path)):
        recorder = RunRecorder(infinity.AdamW(model.parameters()), tmp_path / "run")
        recorder.step(loss=0.25)
    with pytest.raises(infinity.InfinityError, match="closed"):
        recorder.close()
    record = RunRecord.load(tmp_path / "run")
    assert (record.state, record.run["losses"]) == (RunState.FINISHED, [0.25])
    model = build(Net)
    optimizer = infinity.AdamW(model.parameters(), config=config(tmp_path))
    over_state = RunRecorder(optimizer, tmp_path / "state")
    over_state.step(loss=0.75)
    optimizer.close()
    with pytest.raises(infinity.InfinityError, match="closed"):
        over_state.close()
    record = RunRecord.load(tmp_path / "state")
    assert (record.state, record.run["losses"]) == (RunState.FINISHED, [0.75])
    opened = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    assert str(tmp_path / "run" / "metrics.jsonl") not in opened
