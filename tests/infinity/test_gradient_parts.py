"""Gradients that come to host memory in parts, into what the updates before them give back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import infinity
from infinity.gradient_parts import parts_of
from infinity.gradients import GRAD_DTYPE, GroupGradient
from infinity.released import set_fresh_grad
from tests.conftest import MakeEngine
from tests.infinity.test_gradients import Bench, _give, _slow_downloads
from tests.infinity.test_passing_gradients import CHUNK_NUMEL, N_CHUNKS, NBYTES, Blocks, Store, wide
from tests.parity.loops import Loop, assert_parity, smallest_budget
from tests.zoo import Net


class PartsBench(Bench):
    """As `Bench`, where an update follows every gradient at once."""

    def __init__(self, held_nbytes: int, **settings: Any) -> None:
        super().__init__(held_nbytes, part_numel=CHUNK_NUMEL, **settings)


@pytest.fixture
def bench() -> Iterator[PartsBench]:
    bench = PartsBench(NBYTES)
    yield bench
    bench.sink.close()
    assert bench.pool.leased_nbytes == bench.held.used_nbytes == bench.device.budget.used_nbytes == 0
    bench.pool.close()


def arrive(bench: Bench, number: int, value: float) -> GroupGradient:
    """The gradient of a group as its update gets it."""
    group = wide(number)
    bench.sink.expect(group)
    _give(group, value)
    assert bench.sink.harvest(group, is_final=True)
    bench.sink.settle(group)
    return bench.sink.take(group)


def assert_values(gradient: GroupGradient, value: float) -> None:
    for chunk, _ in parts_of(gradient.group, CHUNK_NUMEL):
        for piece in chunk.pieces:
            assert gradient.values(chunk)[piece.start : piece.stop].eq(value).all()


def test_a_gradient_comes_down_into_what_kernels_have_given_back(bench: PartsBench) -> None:
    """There is room for one whole gradient; the kernels of the one before end while the next one arrives."""
    first = arrive(bench, 1, 1.5)
    assert_values(first, 1.5)
    assert len(first.parts) == N_CHUNKS
    waiting = [chunk for chunk, _ in parts_of(first.group, CHUNK_NUMEL)]
    held_nbytes: list[int] = []

    def kernel_ends() -> None:
        """Every look finds one part less in use."""
        held_nbytes.append(sum(part.lease.nbytes for part in first.parts.values()))
        if waiting:
            first.release_part(waiting.pop(0))

    bench.updating, bench.on_look = True, kernel_ends
    second = arrive(bench, 0, 2.5)
    assert held_nbytes[0] == NBYTES
    assert not first.parts
    assert_values(second, 2.5)
    assert bench.held.peak_nbytes == NBYTES
    first.release()
    second.release()


def test_updates_are_hastened_once_for_all_parts(bench: PartsBench) -> None:
    first = arrive(bench, 1, 1.0)
    waiting = [chunk for chunk, _ in parts_of(first.group, CHUNK_NUMEL)]
    looks: list[None] = []

    def kernel_ends() -> None:
        """At every second look: each part is waited for."""
        looks.append(None)
        if len(looks) % 2 == 0 and waiting:
            first.release_part(waiting.pop(0))

    bench.updating, bench.on_look = True, kernel_ends
    arrive(bench, 0, 1.0).release()
    assert bench.n_awaited == 1


def test_what_is_not_complete_comes_whole(bench: PartsBench) -> None:
    group = wide(0)
    set_fresh_grad(group.parameters[1], torch.ones(30))
    bench.sink.harvest(group, is_final=True)
    gradient = bench.sink.take(group)
    assert gradient.block is not None
    gradient.release()


@pytest.mark.parametrize("settings", [{"is_final": False}, {"wants_norms": True}, {"wants_peaks": True}])
def test_what_is_not_used_up_at_once_comes_whole(settings: dict[str, bool]) -> None:
    bench = PartsBench(NBYTES)
    is_final = settings.pop("is_final", True)
    for name, value in settings.items():
        setattr(bench.sink, name, value)
    group = wide(0)
    _give(group, 1.0)
    bench.sink.harvest(group, is_final=is_final)
    view = bench.sink.view(group, 0)
    assert view is not None
    assert view.eq(1.0).all()
    bench.sink.close()
    assert bench.pool.leased_nbytes == 0
    bench.pool.close()


def test_a_late_gradient_makes_room_for_parts() -> None:
    """It waits for the end of backward, so no update gives its memory back."""
    store = Store(is_slow=False)
    bench = PartsBench(NBYTES, store=store)
    late = wide(2)
    _give(late, 3.0)
    bench.sink.harvest(late, is_final=False)
    gradient = arrive(bench, 0, 1.0)
    assert store.done == [f"write g2/grad {NBYTES}"]
    assert_values(gradient, 1.0)
    gradient.release()
    bench.sink.close()
    assert bench.pool.leased_nbytes == 0
    bench.pool.close()


def test_without_room_for_the_last_part_nothing_is_left(bench: PartsBench) -> None:
    first = arrive(bench, 1, 1.0)
    first.release_part(next(parts_of(first.group, CHUNK_NUMEL))[0])  # and its update fails before it gives back more
    group = wide(0)
    bench.sink.expect(group)
    _give(group, 1.0)
    with pytest.raises(infinity.PlacementError, match="gradient of g0: "):
        bench.sink.harvest(group, is_final=True)
    assert not bench.held.waiting()
    bench.sink.discard()
    assert bench.held.used_nbytes == NBYTES - CHUNK_NUMEL * GRAD_DTYPE.itemsize
    first.release()


def test_device_memory_is_held_until_every_part_has_arrived(bench: PartsBench, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = _slow_downloads(bench, monkeypatch)
    gradient = arrive(bench, 0, 1.0)
    assert len(copies) >= N_CHUNKS
    assert len(gradient.fences) == len(copies)
    for copy in copies[:-1]:
        copy.ticket.set_done()
    bench.sink.end_backward()
    assert bench.device.budget.used_nbytes
    copies[-1].ticket.set_done()
    bench.sink.end_backward()
    assert not bench.device.budget.used_nbytes
    gradient.release()


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_bits_and_bytes_of_an_engine(offload: MakeEngine, device: str) -> None:
    """Groups of many chunks with room for the largest gradient alone, which nothing exceeds."""
    make = partial(Net, blocks=6)
    settings: dict[str, Any] = {"schedule": "overlapped", "chunk": "16KiB"}
    budget = smallest_budget(offload, "host", make(), **settings)
    engine = assert_parity(
        Loop(make, steps=4), offload, host={"budget": budget}, device={"kind": device, "budget": "64MiB"}, **settings
    )
    assert not engine.plan.placement.chunked


def test_bits_and_bytes_of_groups_of_which_some_come_in_parts(offload: MakeEngine) -> None:
    """A block that leaves a layer out has no gradient for it, and comes whole."""
    loop = Loop(Blocks, steps=4)
    settings: dict[str, Any] = {
        "schedule": "overlapped",
        "chunk": "256KiB",
        "device": {"kind": "cpu", "budget": "64MiB"},
    }
    engine = assert_parity(loop, offload, host={"budget": "24MiB"}, check_traffic=False, **settings)
    placement = engine.plan.placement
    assert not placement.chunked
    largest = max(group.layout.numel for group in engine._runtime.groups)
    assert largest > 4 * placement.chunk_numel
