"""Ctrl-C wherever the training thread waits or works: what can go on goes on, what is lost says so, nothing hangs."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.ending import end_executor
from infinity.gradients import GroupGradient, gradient_key
from infinity.groups import FlatGroup
from infinity.torch_compat import CheckpointRun
from storage.backends.faulty import Fault, FaultyBackend
from storage.pool import map_private
from storage.store import ShardStore
from storage.types import Op, Ticket, TrafficTag
from tests.conftest import MakeEngine
from tests.leaks import check_empty, check_given_back, swap_folders
from tests.mechanics.test_iterations import nothing_gathered
from tests.zoo import Net, batch, build, loss_of, one_step

_DEADLINE_S = 100.0


def _interrupt_when(is_time: Callable[[], bool]) -> threading.Thread:
    """Press Ctrl-C as soon as something is the case."""
    main = threading.get_ident()

    def watch() -> None:
        deadline_s = time.monotonic() + _DEADLINE_S
        while not is_time() and time.monotonic() < deadline_s:
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=watch, name="ctrl-c")
    thread.start()
    return thread


class _Once:
    """Raises KeyboardInterrupt at one of its calls, and does what it stands for at all others."""

    def __init__(self, does: Callable[..., Any], at_call: int = 0) -> None:
        self._does = does
        self._left = at_call
        self.has_raised = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._left and not self.has_raised:
            self.has_raised = True
            raise KeyboardInterrupt
        self._left -= 1
        return self._does(*args, **kwargs)


def _make(offload: MakeEngine, schedule: str, **settings: Any) -> tuple[nn.Module, infinity.Engine, infinity.AdamW]:
    model = build(Net)
    engine = offload(model, schedule=schedule, host={"budget": "440KiB"}, **settings)
    return model, engine, infinity.AdamW(model.parameters(), lr=1e-2)


def test_a_demand_that_was_interrupted_leaves_no_claim(offload: MakeEngine, drive: Callable[[], FaultyBackend]) -> None:
    """What it reads later would otherwise count as in use for ever, and the next gather would wait for that to end."""
    model, engine, optimizer = _make(offload, "synchronous")
    one_step(model, optimizer, 0)
    engine.metrics()
    io = engine._runtime.io
    drive().inject(Fault.STUCK, op=Op.READ, times=None, when=lambda request: "/state" not in request.key)
    watcher = _interrupt_when(lambda: bool(drive().stuck()))
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        loss_of(model, batch(1))  # what is read ahead for it, and never comes, fills the window
    watcher.join()
    waiting: list[bool] = []
    watcher = _interrupt_when(lambda: bool(io._tasks) and not waiting.append(True))
    with pytest.raises(KeyboardInterrupt), infinity.gathered(model.get_submodule("head")):
        pytest.fail("it cannot be there")
    watcher.join()
    assert waiting
    drive().clear()
    drive().release_stuck()
    with infinity.gathered(model.get_submodule("head")):
        assert model.get_parameter("head.weight").isfinite().all()
    one_step(model, optimizer, 1)
    nothing_gathered(engine)


@pytest.mark.parametrize("where", ["before it is told that a copy was used", "just after it has claimed one"])
def test_a_forward_that_was_interrupted_leaves_no_claim(
    offload: MakeEngine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    model, engine, optimizer = _make(offload, "deferred")
    one_step(model, optimizer, 0)
    gatherer = engine._runtime.gatherer
    with monkeypatch.context() as patch:
        if where == "just after it has claimed one":
            patch.setattr(gatherer, "_upload", _Once(gatherer._upload, at_call=2))
        else:
            io, consumed = engine._runtime.io, engine._runtime.read_ahead.consumed
            post, interrupt = io.post, _Once(io.post, at_call=2)
            patch.setattr(io, "post", lambda does, *args: (interrupt if does == consumed else post)(does, *args))
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, batch(1))
    for number in (2, 3):
        one_step(model, optimizer, number)
    assert not [copy for copy in engine._runtime.copies if copy.is_claimed and not copy.pinned]
    nothing_gathered(engine)


@pytest.mark.parametrize("moment", ["begin", "end"])
def test_a_checkpoint_that_was_interrupted_while_it_began_or_ended_is_over(
    offload: MakeEngine, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """What is computed next would otherwise be saved as a part of it, and computed again from inputs of before."""
    losses: list[list[float]] = []
    for is_interrupted in (False, True):
        model, engine, optimizer = _make(offload, "deferred", activations={"policy": "nvme", "host_budget": "64KiB"})
        losses.append([one_step(model, optimizer, 0)])
        if is_interrupted:
            with monkeypatch.context() as patch:
                does, calls = getattr(CheckpointRun, moment), _Once(lambda: None, at_call=2)

                def interrupted(run: CheckpointRun, does: Any = does, calls: _Once = calls) -> None:
                    if moment == "begin":  # Python looks for signals once the call that has begun it is over
                        does(run)
                    calls()
                    if moment == "end":
                        does(run)

                patch.setattr(CheckpointRun, moment, interrupted)
                with pytest.raises(KeyboardInterrupt) as error:
                    loss_of(model, batch(1))
            optimizer.zero_grad()
            assert error.value.__traceback__ is not None  # its frames keep what was under way
        losses[-1] += [one_step(model, optimizer, number) for number in (1, 2)]
        with torch.enable_grad():
            (torch.ones(3, requires_grad=True) ** 2).sum().backward()
        nothing_gathered(engine)
        engine.close()
    assert losses[0] == losses[1]


def test_zero_grad_ends_a_forward_that_was_interrupted(offload: MakeEngine) -> None:
    """Its memory goes back, and what another model computes is no part of it, although torch runs no hook behind it."""
    model = build(Net)
    engine = offload(model, activations={"policy": "recompute"})
    optimizer = infinity.AdamW(model.parameters())

    def interrupt(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.get_submodule("blocks.2.up").register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt) as error:
        loss_of(model, batch(0))
    optimizer.zero_grad()
    nothing_gathered(engine)
    assert error.value.__traceback__ is not None  # its frames keep what was under way
    other = torch.ones(3, requires_grad=True)
    (other**2).sum().backward()  # type: ignore[no-untyped-call]
    assert other.grad is not None
    assert torch.equal(other.grad, torch.full((3,), 2.0))
    handle.remove()
    one_step(model, optimizer, 0)
    nothing_gathered(engine)


def test_zero_grad_in_the_middle_of_a_forward_leaves_it_alone(offload: MakeEngine) -> None:
    model, plain = build(Net), build(Net)
    offload(model)
    optimizer = infinity.AdamW(model.parameters())
    hook = model.get_submodule("blocks.2.up").register_forward_pre_hook(lambda module, args: optimizer.zero_grad())
    losses = [
        one_step(model, optimizer, 0),
        one_step(plain, torch.optim.AdamW(plain.parameters(), fused=True), 0),
    ]
    hook.remove()
    assert losses[0] == losses[1]


def _first_of(entries: list[Any], does: Callable[..., Any]) -> Callable[..., Any]:
    """Raises KeyboardInterrupt when it is called for one of these entries for the first time."""
    interrupt = _Once(does)
    return lambda entry, priority: (interrupt if entry in entries else does)(entry, priority)


def test_an_input_whose_read_was_interrupted_is_read_again(
    offload: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward of another forward has begun to read it ahead; its memory would be taken for the input."""
    trained: list[list[torch.Tensor]] = []
    for is_interrupted in (False, True):
        model, engine, optimizer = _make(offload, "deferred", activations={"policy": "nvme", "host_budget": "32KiB"})
        first = loss_of(model, batch(0))
        activations = engine._runtime.activations
        mine = list(activations._entries)
        second = loss_of(model, batch(1))
        if is_interrupted:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(activations, "_read", _first_of(mine, activations._read))
                second.backward()  # type: ignore[no-untyped-call]
        else:
            second.backward()  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        first.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with infinity.gathered(model):
            trained.append([parameter.detach().clone() for parameter in model.parameters()])
        engine.close()
    for wanted, found in zip(*trained, strict=True):
        assert torch.equal(wanted, found)


@pytest.mark.parametrize("schedule", ["synchronous", "deferred"])
def test_a_step_that_was_interrupted_while_it_took_gradients_is_lost(
    offload: MakeEngine, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """Some parameters count as updated and others not: nobody may go on with that without being told."""
    model, engine, optimizer = _make(offload, schedule)
    one_step(model, optimizer, 0)
    loss_of(model, batch(1)).backward()  # type: ignore[no-untyped-call]
    sink = engine._runtime.sink
    monkeypatch.setattr(sink, "take", _Once(sink.take, at_call=2))
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    with pytest.raises(infinity.IterationError, match="lost half-way"):
        for number in (2, 3):
            optimizer.zero_grad()
            one_step(model, optimizer, number)


def _interrupt_step(
    monkeypatch: pytest.MonkeyPatch,
    trained: tuple[nn.Module, infinity.Engine, infinity.AdamW],
    message: Callable[..., None],
) -> None:
    """Ctrl-C where the training thread is about to send a message."""
    model, engine, optimizer = trained
    io = engine._runtime.io
    post, interrupt = io.post, _Once(io.post)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(io, "post", lambda does, *args: (interrupt if does == message else post)(does, *args))
        loss_of(model, batch(1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@pytest.mark.parametrize(
    ("schedule", "way"),
    [
        *((s, "load") for s in ("synchronous", "deferred", "overlapped")),
        ("synchronous", "restore"),
        ("overlapped", "restore"),
    ],
)
def test_updates_that_were_not_handed_over_hold_up_nobody_who_goes_back(
    offload: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, schedule: str, way: str
) -> None:
    """Nobody would end them, and going back waits for all updates that are in flight."""
    more: dict[str, Any] = {"durability": "step"} if way == "restore" else {}
    model, engine, optimizer = _make(offload, schedule, nvme={"io_timeout_s": 1.0}, **more)
    one_step(model, optimizer, 0)
    if way == "load":
        engine.save(tmp_path / "saved")
    else:
        engine.note({})
    pipeline = engine._runtime.pipeline
    message: Callable[..., None] = pipeline.defer if schedule == "deferred" else pipeline.submit
    _interrupt_step(monkeypatch, (model, engine, optimizer), message)
    if way == "load":
        engine.load(tmp_path / "saved", optimizer=optimizer)
    else:
        engine.restore(optimizer=optimizer)
    for number in (1, 2):
        one_step(model, optimizer, number)
    engine.metrics()
    assert not engine._runtime.budgets["gradients"].holders()
    nothing_gathered(engine)


@pytest.mark.parametrize("schedule", ["synchronous", "deferred"])
def test_a_ctrl_c_that_lost_a_step_is_not_raised_again(
    offload: MakeEngine, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """Who looks at the parameters afterwards has pressed nothing: it would end a program that has dealt with it."""
    model, engine, optimizer = _make(offload, schedule)
    one_step(model, optimizer, 0)
    pipeline = engine._runtime.pipeline
    message: Callable[..., None] = pipeline.defer if schedule == "deferred" else pipeline.submit
    _interrupt_step(monkeypatch, (model, engine, optimizer), message)
    for _ in range(2):
        with (
            pytest.raises(infinity.IterationError, match=r"the update was lost.* \(KeyboardInterrupt\)"),
            infinity.gathered(model),
        ):
            pytest.fail("some of it is lost")


def test_frames_of_a_ctrl_c_that_was_dealt_with_keep_nobody_from_loading(offload: MakeEngine, tmp_path: Path) -> None:
    """They hold views of parameters until the garbage collector comes by, or the engine forgets why a step was lost."""
    model, engine, optimizer = _make(offload, "synchronous")
    one_step(model, optimizer, 0)
    engine.save(tmp_path / "saved")

    def interrupt(module: nn.Module, args: Any) -> None:
        kept = module.get_parameter("weight").detach()
        if kept.numel():
            raise KeyboardInterrupt

    def forward() -> None:
        try:
            loss_of(model, batch(1))
        except KeyboardInterrupt as error:
            caught = error  # a cycle: its frames hold this one
            assert caught is error

    gc.disable()
    try:
        handle = model.get_submodule("blocks.1.up").register_forward_pre_hook(interrupt)
        forward()
        handle.remove()
        optimizer.zero_grad()
        assert engine._runtime.gatherer.kept
        engine.load(tmp_path / "saved", optimizer=optimizer)
    finally:
        gc.enable()
    one_step(model, optimizer, 1)
    nothing_gathered(engine)


def test_the_error_of_a_lost_step_keeps_no_views(
    offload: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The engine keeps it, and the frames that it was raised in would keep parameters gathered for ever."""
    model, engine, optimizer = _make(offload, "synchronous")
    one_step(model, optimizer, 0)
    engine.save(tmp_path / "saved")

    def step() -> None:
        with infinity.gathered(model.get_submodule("head")):
            kept = model.get_parameter("head.weight").detach()
        loss_of(model, batch(1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert kept.numel()

    with monkeypatch.context() as patch:
        sink = engine._runtime.sink
        patch.setattr(sink, "take", _Once(sink.take, at_call=2))
        with pytest.raises(KeyboardInterrupt):
            step()
    with pytest.raises(infinity.IterationError, match="lost half-way"):
        one_step(model, optimizer, 1)
    engine.load(tmp_path / "saved", optimizer=optimizer)
    one_step(model, optimizer, 1)
    nothing_gathered(engine)


class _Slow:
    """A copy from the device that is under way."""

    def __init__(self) -> None:
        self.done = False

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.done:
            raise TimeoutError


def test_the_memory_of_a_lost_gradient_stays_until_its_copy_is_over(
    offload: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be given to somebody else, and the device would still write there."""
    model = build(Net)
    engine = offload(model, schedule="synchronous", host={"budget": "8MiB"})
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    one_step(model, optimizer, 0)
    runtime, copying = engine._runtime, _Slow()
    really_take = runtime.sink.take

    def take(group: FlatGroup) -> GroupGradient:
        gradient = really_take(group)
        if group.index == 0:
            gradient.fences.append(copying)
        return gradient

    monkeypatch.setattr(runtime.sink, "take", take)
    _interrupt_step(monkeypatch, (model, engine, optimizer), runtime.pipeline.submit)
    for update in runtime.in_flight:
        assert update.written.wait(_DEADLINE_S)
    held = [owner for owner in runtime.pool.holders() if owner.endswith("/grad")]
    assert held == [gradient_key(runtime.groups[0])]
    copying.done = True
    ended = runtime.io.submit(runtime.pipeline.drain(), "the end of the copy")
    assert ended.wait(_DEADLINE_S)
    assert not [owner for owner in runtime.pool.holders() if owner.endswith("/grad")]


def test_a_step_that_was_interrupted_before_the_device_has_its_values_is_lost(
    offload: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is always on the device would compute with the values of before."""
    model, engine, optimizer = _make(offload, "synchronous", resident_threshold="8KiB")
    assert engine._runtime.resident_groups
    one_step(model, optimizer, 0)
    loss_of(model, batch(1)).backward()  # type: ignore[no-untyped-call]
    gatherer = engine._runtime.gatherer
    monkeypatch.setattr(gatherer, "refresh", _Once(gatherer.refresh))
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    with pytest.raises(infinity.IterationError, match="lost half-way"):
        optimizer.zero_grad()
        one_step(model, optimizer, 2)


def test_an_edit_that_was_interrupted_keeps_its_buffer_until_its_transfer_is_over(
    offload: MakeEngine, drive: Callable[[], FaultyBackend]
) -> None:
    """Somebody else's bytes would otherwise be written as the parameters."""
    model, engine, optimizer = _make(offload, "synchronous")
    one_step(model, optimizer, 0)
    engine.metrics()
    pool = engine._runtime.pool
    drive().inject(Fault.STUCK, op=Op.WRITE)
    watcher = _interrupt_when(lambda: bool(drive().stuck()))
    with pytest.raises(KeyboardInterrupt), infinity.gathered(model.get_submodule("head")), torch.no_grad():
        model.get_parameter("head.weight").add_(1.0)
    watcher.join()
    assert [owner for owner in pool.holders() if owner.startswith("edit of head")]
    drive().release_stuck()
    engine.metrics()
    assert engine._runtime.store is not None
    assert engine._runtime.store.drain(_DEADLINE_S)
    check_given_back(engine._runtime.budgets["pipeline"])  # the transfer is over a little before its memory is back
    assert not [owner for owner in pool.holders() if owner.startswith("edit of head")]
    one_step(model, optimizer, 1)
    nothing_gathered(engine)


@pytest.mark.parametrize("where", ["before anything has begun", "when all of it has begun"])
@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_a_submission_that_was_interrupted_is_over(tmp_path: Path, where: str, op: Op) -> None:
    """Its memory is the caller's again, and what comes after it on the key does not wait for it."""
    tag = TrafficTag("param", 0)
    store = ShardStore.open([tmp_path], 1 << 20)
    try:
        store.create("a", 8192)
        first, second = map_private(8192, huge_pages=False), map_private(8192, huge_pages=False)
        first[:] = b"1" * 8192
        assert store.submit_write("a", first, tag=tag).wait(_DEADLINE_S)
        transfers, submit = store._operations._transfers, store.submit_read if op is Op.READ else store.submit_write
        really_start = transfers.start

        def start(operation: Any) -> Ticket:
            transfers.start = really_start  # type: ignore[method-assign]
            if where == "when all of it has begun":
                really_start(operation)
            raise KeyboardInterrupt

        transfers.start = start  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            submit("a", second, tag=tag)
        assert not store.describe_in_flight()
        again = store.submit_write("a", first, tag=tag)
        assert again.wait(_DEADLINE_S)
        found = store.submit_read("a", second, tag=tag)
        assert found.wait(_DEADLINE_S)
        assert found.exception is None
        assert second == first
    finally:
        store.close()


class _Interrupted(Ticket):
    """A transfer; Ctrl-C arrives just before somebody can watch it."""

    __slots__ = ()

    def add_done_callback(self, function: Callable[[Ticket], None]) -> None:
        raise KeyboardInterrupt


def test_a_spill_that_was_interrupted_leaves_nothing_to_wait_for(
    offload: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody completes would be waited for by the next zero_grad(), until the timeout."""
    model, engine, optimizer = _make(offload, "synchronous")
    assert engine._runtime.placement.spilled_gradients
    one_step(model, optimizer, 0)
    store = engine._runtime.store
    assert store is not None
    really_submit = store.submit_write

    def submit(key: str, *args: Any, **kwargs: Any) -> Ticket:
        written = really_submit(key, *args, **kwargs)
        if not key.endswith("/grad"):
            return written
        watched = _Interrupted(key)
        written.add_done_callback(lambda _: watched.complete(written.exception))
        return watched

    with monkeypatch.context() as patch:
        patch.setattr(store, "submit_write", submit)
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, batch(1)).backward()  # type: ignore[no-untyped-call]
    optimizer.zero_grad()
    one_step(model, optimizer, 2)
    nothing_gathered(engine)


@pytest.mark.parametrize("at_call", [0, 3])
def test_close_goes_on_where_it_was_interrupted(offload: MakeEngine, tmp_path: Path, at_call: int) -> None:
    model, engine, optimizer = _make(offload, "overlapped")
    one_step(model, optimizer, 0)
    handle: Any = engine._runtime.hooks[-1 - at_call]
    handle.remove = _Once(handle.remove)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    engine.close()
    check_empty(engine)
    assert not swap_folders(tmp_path)
    assert not engine._runtime.hooks


def test_a_message_that_was_interrupted_does_not_keep_later_ones_waiting() -> None:
    from infinity.io_loop import IoLoop

    io = IoLoop()
    try:
        wake = io.loop.call_soon_threadsafe
        io.loop.call_soon_threadsafe = _Once(wake)  # type: ignore[method-assign]
        seen: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            io.post(seen.append, 1)
        arrived = threading.Event()
        io.post(seen.append, 2)
        io.post(arrived.set)
        assert arrived.wait(_DEADLINE_S)
        assert seen == [1, 2]
    finally:
        io.close()


def test_an_executor_that_hangs_is_left_behind_and_named(caplog: pytest.LogCaptureFixture) -> None:
    from concurrent.futures import ThreadPoolExecutor

    release = threading.Event()
    executor = ThreadPoolExecutor(1, thread_name_prefix="test-hangs")
    work = executor.submit(release.wait, _DEADLINE_S)
    end_executor(executor, "a commit", timeout_s=0.05)
    assert "a commit has not ended within 0.05 s" in caplog.text
    release.set()
    assert work.result(_DEADLINE_S)
    caplog.clear()
    end_executor(executor, "a commit")
    assert not caplog.text
