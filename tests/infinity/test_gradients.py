"""The gradient sink by itself: accumulation, norms, spilling, and waiting for memory that never comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.device_memory import DeviceMemory
from infinity.devices.base import DeviceBlock
from infinity.devices.cpu import CpuDevice
from infinity.errors import DeviceOutOfMemoryError
from infinity.gradient_blocks import GradientBlocks
from infinity.gradient_sink import GradientSink
from infinity.gradient_spill import GradientSpill
from infinity.gradient_ways import GradientWays
from infinity.gradients import gradient_nbytes
from infinity.groups import FlatGroup
from infinity.observe.stalls import StallCause, StallClock
from infinity.released import Access, fresh_grad, set_fresh_grad
from infinity.shard_io import ShardIo
from infinity.units import Owned
from storage.budget import TierBudget
from storage.pool import HostPool
from storage.types import Ticket


class Nobody(Access):
    def use_released(self, func: object, args: object, kwargs: object) -> None:
        raise AssertionError("nothing is used here")


def _group(index: int, width: int = 40) -> FlatGroup:
    line = nn.Linear(width, 30)
    own = [Owned(name, p, [(line, name)]) for name, p in line.named_parameters()]
    group = FlatGroup(index, f"g{index}", own, shard_dtype=torch.float32, compute_dtype=torch.float32)
    group.attach(torch.device("cpu"), Nobody())
    group.allocate_flat()
    group.put_stand_ins()
    group.show_gathered()
    return group


NBYTES = gradient_nbytes(_group(0))


class Bench:
    """A sink without an engine around it; `updating` says whether an update is under way."""

    def __init__(
        self,
        held_nbytes: int,
        *,
        store: ShardIo | None = None,
        transit_nbytes: int = 0,
        n_spilled: int = 0,
        lasting: frozenset[int] = frozenset(),
        part_numel: int | None = None,
    ) -> None:
        ways = GradientWays(frozenset(range(n_spilled)), lasting, part_numel=part_numel)
        self.pool = HostPool(1 << 20)
        self.held = TierBudget("held", held_nbytes)
        self.device = CpuDevice(1 << 20)
        self.updating = False
        self.n_awaited = 0  # waits for memory that updates give back
        self.made_room: list[FlatGroup] = []
        self.ahead: DeviceBlock | None = None
        self.stalls = StallClock(20.0, progress=lambda: 0, report=lambda: "")
        memory = DeviceMemory(self.device, str)
        blocks = GradientBlocks(memory, self.stalls)
        memory.ask(blocks.free_first, self._free_ahead)
        self.sink = self.make_sink(
            device=self.device,
            pool=self.pool,
            spill=GradientSpill(store, self.stalls, ways, self.made_room.append),
            held=self.held,
            transit=TierBudget("transit", transit_nbytes),
            updates_in_flight=self._updates_in_flight,
            start_waiting=self._start_waiting,
            updates_awaited=self._updates_awaited,
            blocks=blocks,
            advice=lambda: "use schedule='synchronous'",
            stalls=self.stalls,
        )
        self.on_look: Callable[[], None] = lambda: None
        self.start_waiting: Callable[[], bool] = lambda: False

    def make_sink(self, **parts: Any) -> GradientSink:
        return GradientSink(**parts)

    def _start_waiting(self) -> bool:
        return self.start_waiting()

    @contextmanager
    def _updates_awaited(self) -> Iterator[None]:
        self.n_awaited += 1
        yield

    def _updates_in_flight(self) -> bool:
        self.on_look()
        return self.updating

    def _free_ahead(self) -> bool:
        block, self.ahead = self.ahead, None
        if block is not None:
            self.device.free(block)
        return block is not None


class Slow:
    """A copy that is over when its ticket is."""

    def __init__(self) -> None:
        self.ticket = Ticket("a slow copy")

    @property
    def done(self) -> bool:
        return self.ticket.done

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.ticket.wait(timeout_s):
            raise TimeoutError
        self.ticket.result()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(2 * NBYTES)
    yield bench
    bench.sink.close()
    assert bench.pool.leased_nbytes == bench.held.used_nbytes == bench.device.budget.used_nbytes == 0
    bench.pool.close()


def _give(group: FlatGroup, value: float) -> None:
    for parameter in group.parameters:
        set_fresh_grad(parameter, torch.full_like(parameter, value))


def test_gradients_add_up(bench: Bench) -> None:
    group = _group(0)
    for value in (1.0, 2.5):
        bench.sink.expect(group)
        _give(group, value)
        assert bench.sink.harvest(group, is_final=True)
    assert all(fresh_grad(parameter) is None for parameter in group.parameters)
    assert not bench.sink.harvest(group, is_final=True)
    gradient = bench.sink.take(group)
    for slot in range(2):
        assert torch.equal(gradient.slot_view(slot), torch.full_like(gradient.slot_view(slot), 3.5))
    assert bench.held.used_nbytes == NBYTES
    gradient.release()
    gradient.release()


def test_slots_without_a_gradient_are_absent(bench: Bench) -> None:
    group = _group(0)
    set_fresh_grad(group.parameters[1], torch.ones(30))
    assert bench.sink.harvest(group, is_final=True)
    assert [bench.sink.has(group, slot) for slot in (0, 1)] == [False, True]
    norms = bench.sink.norms([(group, 0), (group, 1)])
    assert [float(norm) for norm in norms] == [pytest.approx(30**0.5)]
    set_fresh_grad(group.parameters[0], torch.ones(30, 40))
    bench.sink.harvest(group, is_final=True)
    assert len(bench.sink.norms([(group, 0), (group, 1)])) == 2


def test_norms_follow_later_gradients(bench: Bench) -> None:
    group = _group(0)
    _give(group, 1.0)
    bench.sink.harvest(group, is_final=True)
    before = bench.sink.norms([(group, 1)])[0]
    _give(group, 1.0)
    bench.sink.harvest(group, is_final=True)
    assert bench.sink.norms([(group, 1)])[0] == pytest.approx(2 * float(before))


def test_what_was_expected_and_never_came(bench: Bench) -> None:
    group = _group(0)
    bench.sink.expect(group)
    bench.sink.expect(group)
    assert bench.device.budget.used_nbytes == group.flat_nbytes
    bench.sink.end_backward()
    assert bench.device.budget.used_nbytes == 0
    assert bench.sink.pending() == []


def test_discard(bench: Bench) -> None:
    group = _group(0)
    _give(group, 1.0)
    bench.sink.harvest(group, is_final=True)
    bench.sink.discard()
    assert not bench.sink.has(group, 0)
    assert bench.held.used_nbytes == 0


def test_no_memory_and_nobody_to_wait_for(bench: Bench) -> None:
    groups = [_group(number) for number in range(3)]
    for group in groups[:2]:
        _give(group, 1.0)
        bench.sink.harvest(group, is_final=True)
    _give(groups[2], 1.0)
    with pytest.raises(infinity.PlacementError, match="gradient of g2: "):
        bench.sink.harvest(groups[2], is_final=True)
    assert not bench.held.waiting()


def test_waiting_for_an_update_that_gives_memory_back(bench: Bench) -> None:
    groups = [_group(number) for number in range(3)]
    for group in groups[:2]:
        _give(group, 1.0)
        bench.sink.harvest(group, is_final=True)
    bench.updating = True
    gradient = bench.sink.take(groups[0])
    threading.Timer(0.01, gradient.release).start()
    _give(groups[2], 1.0)
    assert bench.sink.harvest(groups[2], is_final=True)
    assert bench.stalls.counts[StallCause.GRADIENT_SPACE] <= 1


def test_updates_that_wait_for_their_units_are_started_rather_than_refusing_a_gradient(bench: Bench) -> None:
    groups = [_group(number) for number in range(3)]
    for group in groups[:2]:
        _give(group, 1.0)
        bench.sink.harvest(group, is_final=True)
    waiting = bench.sink.take(groups[0])  # its update has been deferred: nothing is under way

    def start() -> bool:
        bench.updating = True
        threading.Timer(0.01, waiting.release).start()
        return True

    bench.start_waiting = start
    _give(groups[2], 1.0)
    assert bench.sink.harvest(groups[2], is_final=True)
    assert bench.updating


def test_the_last_update_ends_without_giving_memory_back(bench: Bench) -> None:
    """Found out while waiting, not at the I/O timeout."""
    groups = [_group(number) for number in range(3)]
    for group in groups[:2]:
        _give(group, 1.0)
        bench.sink.harvest(group, is_final=True)
    looks: list[bool] = []

    def look() -> None:
        """The update has ended when its waiting is looked at again."""
        looks.append(bench.updating)
        bench.updating = len(looks) == 1

    bench.updating, bench.on_look = True, look
    _give(groups[2], 1.0)
    assert bench.n_awaited == 0
    with pytest.raises(infinity.PlacementError, match="schedule='synchronous'"):
        bench.sink.harvest(groups[2], is_final=True)
    assert (bench.n_awaited, looks) == (1, [True, True])


class _SlowToTell:
    """A store whose write is over for a while before everybody who watches it has been told."""

    n_drives = 1

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.tickets: list[Ticket] = []

    def submit_read(self, key: str, *args: object, **kwargs: object) -> Ticket:
        raise AssertionError(f"{key} is read")

    def promote(self, key: str) -> None:
        raise AssertionError(f"{key} is waited for")

    def submit_write(self, key: str, *args: object, **kwargs: object) -> Ticket:
        self.tickets.append(Ticket(key))
        self.tickets[-1].add_done_callback(lambda _: self.goes_on.wait(100))
        return self.tickets[-1]


def test_a_write_is_under_way_until_its_memory_is_back() -> None:
    """A gradient that waits for the memory of a spilled one sees its write end before the memory is given back."""
    store = _SlowToTell()
    bench = Bench(0, store=store, transit_nbytes=NBYTES, n_spilled=2)
    first, second = _group(0), _group(1)
    _give(first, 1.0)
    bench.sink.harvest(first, is_final=True)
    bench.sink.settle(first)
    worker = threading.Thread(target=store.tickets[0].set_done)
    worker.start()
    assert store.tickets[0].wait(100)
    looks: list[None] = []

    def look() -> None:
        looks.append(None)
        if len(looks) > 1:
            store.goes_on.set()

    bench.on_look = look
    _give(second, 2.0)
    assert bench.sink.harvest(second, is_final=True)
    worker.join()
    bench.sink.check_writes()
    bench.sink.close()
    assert bench.pool.leased_nbytes == 0
    bench.pool.close()


class _Moved(_SlowToTell):
    """A store whose transfers are over at once; what is written is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []
        self._bytes: dict[str, bytes] = {}

    def submit_read(self, key: str, *args: object, **kwargs: object) -> Ticket:
        self.done.append(f"read {key}")
        memory = args[0]
        assert isinstance(memory, memoryview)
        memory[:] = self._bytes[key]
        return Ticket.completed(key)

    def submit_write(self, key: str, *args: object, **kwargs: object) -> Ticket:
        self.done.append(f"write {key}")
        memory = args[0]
        assert isinstance(memory, memoryview)
        self._bytes[key] = bytes(memory)
        return Ticket.completed(key)


def _backward(bench: Bench, *groups: FlatGroup, value: float) -> None:
    for group in groups:
        bench.sink.expect(group)
        _give(group, value)
        bench.sink.harvest(group, is_final=True)
        bench.sink.settle(group)
    bench.sink.end_backward()


@pytest.mark.parametrize("has_forward", [True, False])
def test_the_last_gradient_waits_in_transit_until_another_backward_comes(has_forward: bool) -> None:
    store = _Moved()
    bench = Bench(0, store=store, transit_nbytes=NBYTES, n_spilled=2, lasting=frozenset({0}))
    last, first = _group(0), _group(1)
    _backward(bench, first, last, value=1.0)
    assert store.done == ["write g1/grad"]
    if has_forward:
        bench.sink.spill_kept()
        assert store.done == ["write g1/grad", "write g0/grad"]
    _backward(bench, first, last, value=2.0)
    done = ["write g1/grad", "write g0/grad", "read g1/grad", "write g1/grad", "read g0/grad"]
    assert store.done == done
    gradients = [bench.sink.take(group) for group in (first, last)]
    assert [gradient.is_spilled for gradient in gradients] == [True, False]  # what was written of the last one is old
    assert torch.equal(gradients[1].slot_view(0), torch.full_like(gradients[1].slot_view(0), 3.0))
    for gradient in gradients:
        gradient.release()
    bench.sink.spill_kept()  # the next step's forward finds nothing that waits
    assert store.done == done
    bench.sink.close()
    assert bench.pool.leased_nbytes == 0
    bench.pool.close()


def test_a_gradient_that_waits_for_the_step_does_not_make_room_that_a_write_gives() -> None:
    """Otherwise what a step moves would depend on how fast a write landed."""
    store = _SlowToTell()
    store.goes_on.set()
    bench = Bench(0, store=store, transit_nbytes=2 * NBYTES, n_spilled=3, lasting=frozenset({0, 1}))
    looks: list[None] = []

    def look() -> None:
        """The write is over when the last of three gradients has been found to have no room."""
        looks.append(None)
        if len(looks) == 3:
            store.tickets[0].set_done()

    bench.on_look = look
    _backward(bench, _group(2), _group(1), _group(0), value=1.0)
    assert [ticket.label for ticket in store.tickets] == ["g2/grad"]
    bench.sink.close()
    assert bench.pool.leased_nbytes == 0
    bench.pool.close()


def test_a_gradient_that_was_not_the_last_makes_room() -> None:
    """The plan knows units by their index; a loop may run them in another order."""
    store = _Moved()
    bench = Bench(0, store=store, transit_nbytes=NBYTES, n_spilled=2, lasting=frozenset({0}))
    _backward(bench, _group(0), _group(1), value=1.0)
    assert store.done == ["write g0/grad", "write g1/grad"]
    bench.sink.close()
    assert bench.pool.leased_nbytes == 0
    bench.pool.close()


def test_settling_is_waiting_without_the_error() -> None:
    clock = StallClock(1.0, progress=lambda: 0, report=lambda: "")
    ticket = Ticket("failed")
    ticket.set_exception(ArithmeticError())
    clock.settle(ticket, StallCause.NVME_READ)
    with pytest.raises(ArithmeticError):
        clock.wait(ticket, StallCause.NVME_READ)
    assert clock.total_s == 0


def _slow_downloads(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[Slow]:
    copies: list[Slow] = []

    def download(*args: object, **kwargs: object) -> Slow:
        copies.append(Slow())
        return copies[-1]

    monkeypatch.setattr(bench.device, "download", download)
    return copies


def test_copy_that_failed_before_anybody_looked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that has not arrived is never taken for one that has."""
    copies = _slow_downloads(bench, monkeypatch)
    group = _group(0)
    bench.sink.expect(group)
    _give(group, 1.0)
    bench.sink.harvest(group, is_final=True)
    copies[0].ticket.set_exception(RuntimeError("the link is down"))
    copies[1].ticket.set_done()
    _give(group, 1.0)
    with pytest.raises(RuntimeError, match="the link is down"):
        bench.sink.harvest(group, is_final=True)
    for copy in copies:
        copy.ticket.set_done()
    bench.sink.discard()
    assert bench.held.used_nbytes == bench.device.budget.used_nbytes == 0


def test_copy_that_cannot_start(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    group = _group(0)
    bench.sink.expect(group)
    _give(group, 1.0)
    with monkeypatch.context() as patched:

        def download(*args: object, **kwargs: object) -> Slow:
            raise RuntimeError("no")

        patched.setattr(bench.device, "download", download)
        with pytest.raises(RuntimeError, match="no"):
            bench.sink.harvest(group, is_final=True)
    bench.sink.discard()
    assert bench.held.used_nbytes == bench.device.budget.used_nbytes == 0


def test_device_memory_for_the_next_gradient(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on its way down is waited for, then what was uploaded ahead gives way, and only then is it an error."""
    copies = _slow_downloads(bench, monkeypatch)
    first, second, third = (_group(n) for n in range(3))
    rest_nbytes = bench.device.budget.limit_nbytes - 2 * first.flat_nbytes
    rest = bench.device.allocate(rest_nbytes, "the rest")
    bench.sink.expect(first)
    _give(first, 1.0)
    bench.sink.harvest(first, is_final=True)
    bench.ahead = bench.device.allocate(first.flat_nbytes, "uploaded ahead")
    landing = threading.Timer(0.05, lambda: [copy.ticket.set_done() for copy in copies])
    landing.start()
    bench.sink.expect(second)
    landing.join()
    assert bench.ahead is not None
    assert bench.stalls.counts[StallCause.LINK] == 1
    bench.sink.expect(third)
    assert bench.ahead is None
    with pytest.raises(DeviceOutOfMemoryError):
        bench.sink.expect(_group(3))
    bench.device.free(rest)
