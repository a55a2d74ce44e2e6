"""Transfers that fail or get stuck during training: a clear error where the user waits, and what works after it."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.checkpoint.load import stand_still
from infinity.devices import cpu
from infinity.observe.shortages import report_of
from storage.backends.base import Backend
from storage.backends.faulty import Fault, FaultyBackend
from storage.backends.wrapper import BackendWrapper
from storage.errors import (
    IntegrityError,
    IoError,
    IoTimeoutError,
    ReadError,
    StorageError,
    SwapFullError,
    WriteError,
)
from storage.types import IoRequest, Op, Priority, TrafficTag
from tests.conftest import MakeEngine, small_config
from tests.leaks import check_given_back, swap_folders
from tests.mechanics.test_iterations import nothing_gathered
from tests.parity.loops import gathered_parameters, smallest_budget
from tests.zoo import Net, batch, build, loss_of, one_step

TIGHT = {"budget": "440KiB"}


def _is(part: str) -> Callable[[IoRequest], bool]:
    return lambda request: part in request.key


def _is_param(request: IoRequest) -> bool:
    return "/state" not in request.key and "/grad" not in request.key


def _make(offload: MakeEngine, schedule: str, **settings: Any) -> tuple[nn.Module, infinity.Engine, infinity.AdamW]:
    model = build(Net)
    engine = offload(model, schedule=schedule, host=TIGHT, **settings)
    return model, engine, infinity.AdamW(model.parameters(), lr=1e-2)


def _plain(numbers: list[int], make: Callable[[], nn.Module] = Net) -> dict[str, torch.Tensor]:
    model = build(make)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for number in numbers:
        one_step(model, optimizer, number)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _assert_trained(model: nn.Module, numbers: list[int], make: Callable[[], nn.Module] = Net) -> None:
    expected = _plain(numbers, make)
    for name, parameter in gathered_parameters(model).items():
        assert torch.equal(parameter, expected[name]), name


def _train_again(model: nn.Module, optimizer: infinity.AdamW) -> None:
    """A wait that ran into the lost update itself is followed by one more report of it as such."""
    with contextlib.suppress(StorageError):
        one_step(model, optimizer, 4)
    one_step(model, optimizer, 4)


@pytest.mark.parametrize("schedule", ["overlapped", "synchronous"])
def test_read_error_in_forward(offload: MakeEngine, drive: Callable[[], FaultyBackend], schedule: str) -> None:
    """The iteration is lost; with the drive back, training goes on with the same bits."""
    model, engine, optimizer = _make(offload, schedule)
    one_step(model, optimizer, 0)
    engine.metrics()
    drive().inject(Fault.IO_ERROR, op=Op.READ, times=None)
    for _ in range(2):
        with pytest.raises(ReadError, match=r"Input/output error|EIO") as failure:
            loss_of(model, batch(1))
        assert failure.value.key
        assert str(failure.value.path).endswith(".swap")
    nothing_gathered(engine)
    drive().clear()
    for number in (2, 3):
        one_step(model, optimizer, number)
    _assert_trained(model, [0, 2, 3])


@pytest.mark.parametrize("schedule", ["overlapped", "synchronous"])
def test_one_read_error_ahead_is_tried_again(
    offload: MakeEngine, drive: Callable[[], FaultyBackend], schedule: str
) -> None:
    """What failed while nobody waited is read once more when it is needed."""
    model, engine, optimizer = _make(offload, schedule)
    one_step(model, optimizer, 0)
    engine.metrics()
    with torch.no_grad():
        injection = drive().inject(Fault.IO_ERROR, op=Op.READ, when=_is("head"))
        for _ in range(3):
            try:
                model(batch(1))
            except ReadError:  # somebody was waiting already
                continue
    assert injection.hits == 1
    one_step(model, optimizer, 2)
    _assert_trained(model, [0, 2])


def test_read_error_in_backward(offload: MakeEngine, drive: Callable[[], FaultyBackend]) -> None:
    model, engine, optimizer = _make(offload, "synchronous")
    one_step(model, optimizer, 0)
    loss = loss_of(model, batch(1))
    drive().inject(Fault.IO_ERROR, op=Op.READ, times=None, when=_is("blocks.1"))
    with pytest.raises(ReadError, match=r"blocks\.1"):
        loss.backward()  # type: ignore[no-untyped-call]
    drive().clear()
    del loss
    optimizer.zero_grad()
    for number in (2, 3):
        one_step(model, optimizer, number)
    _assert_trained(model, [0, 2, 3])
    nothing_gathered(engine)


@pytest.mark.parametrize("schedule", ["overlapped", "synchronous"])
@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_error_in_an_update(offload: MakeEngine, drive: Callable[[], FaultyBackend], schedule: str, op: Op) -> None:
    """A lost update leaves parameters of two steps: it is raised as itself once, and as that from then on."""
    model, engine, optimizer = _make(offload, schedule)
    one_step(model, optimizer, 0)
    engine.metrics()
    drive().inject(Fault.IO_ERROR, op=op, when=_is("/state"))
    with pytest.raises(ReadError if op is Op.READ else WriteError, match="/state"):
        for number in range(1, 4):
            one_step(model, optimizer, number)
    for _ in range(2):
        with pytest.raises(infinity.IterationError, match="start again from the last saved state") as lost:
            _train_again(model, optimizer)
        assert isinstance(lost.value.__cause__, IoError)
    with pytest.raises(infinity.IterationError):
        optimizer.step()
    assert "residency" in engine.report()


@pytest.mark.parametrize("schedule", ["overlapped", "synchronous", "deferred"])
@pytest.mark.parametrize(
    ("fault", "op", "budget"),
    [
        (Fault.IO_ERROR, Op.READ, "440KiB"),
        (Fault.NO_SPACE, Op.WRITE, "440KiB"),
        (Fault.BIT_FLIP, Op.READ, "440KiB"),
        (Fault.IO_ERROR, Op.WRITE, "700KiB"),
    ],
    ids=str,
)
def test_a_checkpoint_brings_a_lost_step_back(
    offload: MakeEngine,
    drive: Callable[[], FaultyBackend],
    tmp_path: Path,
    schedule: str,
    fault: Fault,
    op: Op,
    budget: str,
) -> None:
    """In the same process and engine, when the cause is gone; as long as it is there, loading says so."""
    model = build(Net)
    engine = offload(model, schedule=schedule, host={"budget": budget})
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    one_step(model, optimizer, 0)
    engine.save(tmp_path / "saved")
    drive().inject(fault, op=op, when=_is("/state"), times=None)
    with pytest.raises(StorageError):
        for number in range(1, 4):
            one_step(model, optimizer, number)
    with pytest.raises(infinity.IterationError, match=r"engine\.load\(\) a checkpoint; or close this engine"):
        _train_again(model, optimizer)
    if op is Op.WRITE:
        with pytest.raises(StorageError):
            engine.load(tmp_path / "saved")
    drive().clear()
    engine.load(tmp_path / "saved")
    for number in (1, 2):
        one_step(model, optimizer, number)
    _assert_trained(model, [0, 1, 2])
    engine.save(tmp_path / "saved")
    gc.collect()  # the frames of the exceptions hold the graph of a backward that failed
    engine._runtime.gatherer.release_unviewed()
    nothing_gathered(engine)


class _Disturbing(BackendWrapper):
    """Changes a bit of what is to be written of some keys, as memory does that is faulty: before the drive has it."""

    def __init__(self, inner: Backend, disturbs: Callable[[IoRequest], bool]) -> None:
        super().__init__(inner)
        self._disturbs = disturbs
        self.count = 0

    def submit(self, request: IoRequest) -> None:
        if request.op is Op.WRITE and self._disturbs(request):
            request.memory[len(request.memory) // 2] ^= 1
            self.count += 1
        super().submit(request)


@pytest.mark.parametrize("schedule", ["overlapped", "deferred", "synchronous"])
@pytest.mark.parametrize("disturbs", [_is("/state"), _is_param], ids=["state", "param"])
def test_what_memory_loses_on_the_way_to_the_drive_is_told(
    offload: MakeEngine, schedule: str, disturbs: Callable[[IoRequest], bool]
) -> None:
    """Checksums of updates are computed where their bytes are made."""
    disturbed: list[_Disturbing] = []
    is_on: list[bool] = []

    def wrap(inner: Backend) -> Backend:
        disturbed.append(_Disturbing(inner, lambda request: bool(is_on) and disturbs(request)))
        return disturbed[-1]

    model = build(partial(Net, width=256, hidden=1024))
    budgets = {"host": {"budget": "16MiB"}, "device": {"kind": "cpu", "budget": "24MiB"}}
    offload(model, schedule=schedule, wrap_backend=wrap, **budgets)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    one_step(model, optimizer, 0)
    is_on.append(True)
    with pytest.raises((IntegrityError, infinity.IterationError)) as told:
        for number in range(1, 4):
            one_step(model, optimizer, number)
    assert sum(one.count for one in disturbed)
    assert isinstance(told.value, IntegrityError) or isinstance(told.value.__cause__, IntegrityError)


@pytest.mark.parametrize("is_everywhere", [True, False])
def test_a_checkpoint_mends_what_is_damaged_on_the_drive(
    offload: MakeEngine, tmp_path: Path, is_everywhere: bool
) -> None:
    """Bytes of the swap file that somebody else has changed are told, never used, and gone with the next load."""
    model, engine, optimizer = _make(offload, "synchronous")
    one_step(model, optimizer, 0)
    engine.save(tmp_path / "saved")
    (file,) = tmp_path.rglob("*.swap")
    with file.open("r+b") as swap:
        for place in range(0, file.stat().st_size if is_everywhere else 4096, 4096):
            swap.seek(place + 100)
            byte = swap.read(1)
            swap.seek(place + 100)
            swap.write(bytes([byte[0] ^ 1]))
        os.fsync(swap.fileno())
    with pytest.raises((IntegrityError, infinity.IterationError)):
        for number in range(1, 4):
            one_step(model, optimizer, number)
    with contextlib.suppress(IntegrityError, infinity.IterationError):  # an update that ran into it, told later
        one_step(model, optimizer, 4)
    engine.load(tmp_path / "saved")
    for number in (1, 2, 3):
        one_step(model, optimizer, number)
    _assert_trained(model, [0, 1, 2, 3])
    engine.save(tmp_path / "saved")  # every byte that is stored is sound


def test_write_error_of_parameters(offload: MakeEngine, drive: Callable[[], FaultyBackend]) -> None:
    model, engine, optimizer = _make(offload, "overlapped")
    one_step(model, optimizer, 0)
    engine.metrics()
    drive().inject(Fault.NO_SPACE, op=Op.WRITE, when=_is_param)
    with pytest.raises(StorageError, match=r"No space left|no room"):
        for number in range(1, 4):
            one_step(model, optimizer, number)
    with pytest.raises(infinity.IterationError):
        _train_again(model, optimizer)


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_error_of_a_spilled_gradient(offload: MakeEngine, drive: Callable[[], FaultyBackend], op: Op) -> None:
    """Gradients are lost, parameters are not: the next iteration is right, unless an update had begun."""
    model, engine, optimizer = _make(offload, "synchronous")
    assert engine.plan.placement.spilled_gradients
    one_step(model, optimizer, 0)
    engine.metrics()
    drive().inject(Fault.IO_ERROR, op=op, when=_is("/grad"), times=None)
    with pytest.raises(IoError, match="/grad"):
        loss_of(model, batch(1)).backward()  # type: ignore[no-untyped-call]
        loss_of(model, batch(1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    drive().clear()
    optimizer.zero_grad()
    one_step(model, optimizer, 2)
    _assert_trained(model, [0, 2])


@pytest.mark.parametrize(("part", "op"), [("/grad", Op.WRITE), ("/grad", Op.READ), ("embed/float32", Op.READ)])
def test_error_in_a_chunk(offload: MakeEngine, drive: Callable[[], FaultyBackend], part: str, op: Op) -> None:
    """Where a group passes host memory in chunks: the iteration is lost, no buffer is, and what follows is right."""
    make = partial(Net, blocks=2, vocab=5000)
    minimum = smallest_budget(offload, "host", build(make), schedule="synchronous")
    model = build(make)
    engine = offload(model, schedule="synchronous", host={"budget": minimum})
    assert engine.plan.placement.chunked
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    one_step(model, optimizer, 0)
    engine.metrics()
    is_meant = _is(part) if part == "/grad" else lambda request: request.key == part
    drive().inject(Fault.IO_ERROR, op=op, when=is_meant, times=None)
    with pytest.raises(IoError, match=part):
        for _ in range(2):
            loss_of(model, batch(1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    drive().clear()
    optimizer.zero_grad()
    check_given_back(engine._runtime.budgets["passage"])
    one_step(model, optimizer, 2)
    _assert_trained(model, [0, 2], make)
    gc.collect()  # the frames of the exception hold the graph of a backward that failed
    engine._runtime.gatherer.release_unviewed()
    nothing_gathered(engine)


def _lose_patience(engine: infinity.Engine, io_timeout_s: float) -> None:
    """Only from here on: what works may take its time on a busy machine."""
    engine._runtime.stalls._io_timeout_s = io_timeout_s


@pytest.mark.parametrize("schedule", ["overlapped", "synchronous"])
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_stuck_read(offload: MakeEngine, drive: Callable[[], FaultyBackend], schedule: str, where: str) -> None:
    """No wait is for ever: the error tells what is stuck, and the engine can be closed."""
    model, engine, optimizer = _make(offload, schedule)
    one_step(model, optimizer, 0)
    engine.metrics()
    _lose_patience(engine, 0.6)
    with pytest.raises(IoTimeoutError, match=r"no transfer made progress for 0\.6 s") as stuck:
        if where == "forward":
            drive().inject(Fault.STUCK, op=Op.READ, times=None, when=_is_param)
        loss = loss_of(model, batch(1))
        if where == "backward":
            drive().inject(Fault.STUCK, op=Op.READ, times=None, when=_is("blocks.1"))
        if where == "step":
            drive().inject(Fault.STUCK, op=Op.READ, times=None, when=_is("/state"))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    report = str(report_of(stuck.value))
    assert "residency:" in report
    assert "in flight:" in report
    assert "read of " in report
    engine.close()


def test_stuck_write(offload: MakeEngine, drive: Callable[[], FaultyBackend]) -> None:
    model, engine, optimizer = _make(offload, "synchronous")
    _lose_patience(engine, 0.6)
    drive().inject(Fault.STUCK, op=Op.WRITE, times=None)
    with pytest.raises(IoTimeoutError, match="write of ") as stuck:
        for number in range(3):
            one_step(model, optimizer, number)
            engine.metrics()
    assert "in flight:\n  write of " in str(report_of(stuck.value))
    engine.close()


class _Stuck:
    """A copy between host and device that never ends."""

    done = False

    def wait(self, timeout_s: float | None = None) -> None:
        threading.Event().wait(timeout_s)
        raise TimeoutError


@pytest.mark.parametrize("schedule", ["overlapped", "synchronous", "deferred"])
def test_a_gradient_that_never_leaves_the_device(
    offload: MakeEngine, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer's thread does not wait for ever, and what waits for it is told."""
    model, engine, optimizer = _make(offload, schedule, nvme={"io_timeout_s": 0.5})
    _lose_patience(engine, 60.0)
    one_step(model, optimizer, 0)
    engine.metrics()
    _lose_patience(engine, 0.5)
    with monkeypatch.context() as patched:
        patched.setattr(engine._runtime.device, "download", lambda *args, **kwargs: _Stuck())
        with pytest.raises(IoTimeoutError, match=r"from the device|no transfer made progress") as stuck:
            for number in range(1, 4):
                one_step(model, optimizer, number)
    assert "residency:" in str(report_of(stuck.value))
    engine.close()


@pytest.mark.parametrize("schedule", ["overlapped", "synchronous", "deferred"])
def test_a_shard_that_never_reaches_the_device(
    offload: MakeEngine, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host copy stays claimed, because the device may still read it; who needs its memory is told."""
    monkeypatch.setattr(cpu, "can_swap_memory", lambda: False)  # as with an older torch: shards are copied
    model, engine, optimizer = _make(offload, schedule, nvme={"io_timeout_s": 0.5})
    _lose_patience(engine, 60.0)
    one_step(model, optimizer, 0)
    engine.metrics()
    _lose_patience(engine, 0.5)
    device = engine._runtime.device
    upload = device.upload

    def stuck_upload(*args: Any, **kwargs: Any) -> Any:
        upload(*args, **kwargs)
        return _Stuck()

    with monkeypatch.context() as patched:
        patched.setattr(device, "upload", stuck_upload)
        with pytest.raises(IoTimeoutError, match=r"to the device|no transfer made progress") as stuck:
            for number in range(1, 4):
                one_step(model, optimizer, number)
    assert "residency:" in str(report_of(stuck.value))
    engine.close()


def test_short_read(offload: MakeEngine, drive: Callable[[], FaultyBackend]) -> None:
    model, _, optimizer = _make(offload, "synchronous")
    one_step(model, optimizer, 0)
    drive().inject(Fault.SHORT, op=Op.READ, times=None, when=_is("blocks.2"))
    with pytest.raises(IoError, match=r"blocks\.2"):
        one_step(model, optimizer, 1)
    drive().clear()
    optimizer.zero_grad()
    one_step(model, optimizer, 2)
    _assert_trained(model, [0, 2])


def test_late_transfers_change_no_bit(offload: MakeEngine, drive: Callable[[], FaultyBackend]) -> None:
    model, _, optimizer = _make(offload, "overlapped")
    for fault, op in ((Fault.SLOW, Op.READ), (Fault.SLOW, Op.WRITE)):
        drive().inject(fault, op=op, times=20, delay_s=0.003)
    for number in range(4):
        one_step(model, optimizer, number)
    _assert_trained(model, [0, 1, 2, 3])


def test_write_error_while_initialising(tmp_path: Path) -> None:
    def wrap(backend: Backend) -> Backend:
        faulty = FaultyBackend(backend)
        faulty.inject(Fault.NO_SPACE, op=Op.WRITE, when=_is("blocks.2"))
        return faulty

    config = small_config(tmp_path, host=TIGHT, schedule="synchronous")
    with pytest.raises(SwapFullError, match=r"blocks\.2"):
        infinity.offload(build(Net), config, wrap_backend=wrap)
    assert not swap_folders(tmp_path)


def test_no_room_at_the_start(tmp_path: Path) -> None:
    """Nothing is left behind, and the model is as it was."""
    model = build(Net)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    try:
        with pytest.raises(SwapFullError) as failure:
            infinity.offload(model, small_config(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path) in str(failure.value)
    assert not swap_folders(tmp_path)
    assert torch.equal(model(batch(0)), build(Net)(batch(0)))
    with infinity.offload(model, small_config(tmp_path)):
        pass


def test_a_copy_that_fails_while_it_is_looked_at_gives_its_memory_back(
    offload: MakeEngine, drive: Callable[[], FaultyBackend]
) -> None:
    """The loop hears of the failure between the claim and its end; nobody would look at the copy again."""
    model, engine, optimizer = _make(offload, "synchronous")
    one_step(model, optimizer, 0)
    engine.metrics()
    runtime, goes_on = engine._runtime, threading.Event()
    stand_still(runtime)
    copy = next(copy for copy in runtime.copies if not copy.pinned)
    drive().inject(Fault.IO_ERROR, op=Op.READ, times=1)

    async def read() -> None:
        window = runtime.read_ahead._window
        assert window.try_read(copy, Priority.READ_AHEAD, TrafficTag("param", 0))
        goes_on.wait(20.0)  # the loop hears nothing until then

    async def nothing() -> None:
        return

    reading = runtime.io.submit(read(), "reading")
    while copy.ticket.exception is None:
        assert not reading.done
        copy.ticket.wait(0.01)
    really_claim = copy.claim

    def claim() -> bool:
        is_claimed = really_claim()
        goes_on.set()
        assert runtime.io.submit(nothing(), "what was posted before").wait(20.0)
        return is_claimed

    copy.claim = claim  # type: ignore[method-assign]
    assert runtime.gatherer.claims.try_take(copy.group) is None
    copy.claim = really_claim  # type: ignore[method-assign]
    assert runtime.io.submit(nothing(), "what was posted before").wait(20.0)
    assert not copy.is_claimed
    assert copy.block is None
    one_step(model, optimizer, 1)
    _assert_trained(model, [0, 1])


def test_a_device_that_is_full_is_not_its_own_cause(offload: MakeEngine) -> None:
    """Where nothing explains it, the error of the budget comes as it is."""
    model = build(Net)
    engine = offload(model)
    budget = engine._runtime.device.budget
    with budget.request(budget.limit_nbytes - budget.used_nbytes, "somebody else"):
        with pytest.raises(infinity.DeviceOutOfMemoryError, match="somebody else") as full:
            one_step(model, infinity.AdamW(model.parameters(), lr=1e-2), 0)
        assert full.value.__cause__ is None
