"""Gradients that go to the swap file in chunks as they arrive, though host memory could hold them whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from infinity.chunked_sink import ChunkedGradientSink
from infinity.gradients import GRAD_DTYPE, gradient_nbytes
from infinity.groups import FlatGroup
from infinity.layout import SHARD_ALIGN_NUMEL
from infinity.passage import TRANSIT_NUMEL, Passage
from infinity.released import set_fresh_grad
from storage.budget import TierBudget
from storage.types import Ticket
from tests.conftest import MakeEngine
from tests.infinity.test_gradients import Bench, _backward, _group
from tests.parity.loops import Loop, assert_parity

CHUNK_NUMEL = SHARD_ALIGN_NUMEL


def wide(index: int) -> FlatGroup:
    """A group of three chunks."""
    return _group(index, 400)


NBYTES, CHUNK_NBYTES = gradient_nbytes(wide(0)), CHUNK_NUMEL * GRAD_DTYPE.itemsize
N_CHUNKS = NBYTES // CHUNK_NBYTES


class Store:
    """What was written is read again, the rest is NaN. `is_slow`: a write lands when the next one is submitted."""

    n_drives = 1

    def __init__(self, *, is_slow: bool = True) -> None:
        self.is_slow = is_slow
        self.done: list[str] = []
        self.bytes: dict[str, bytearray] = {}
        self.last = Ticket.completed()

    def submit_write(self, key: str, memory: memoryview, *, offset: int = 0, **_: Any) -> Ticket:
        self.done.append(f"write {key} {len(memory)}")
        whole = self.bytes.setdefault(key, bytearray(b"\xff" * NBYTES))
        whole[offset : offset + len(memory)] = memory
        before, self.last = self.last, Ticket(key)
        if not before.done:
            before.set_done()
        if not self.is_slow:
            self.land()
        return self.last

    def submit_read(self, key: str, memory: memoryview, *, offset: int = 0, **_: Any) -> Ticket:
        self.done.append(f"read {key} {len(memory)}")
        memory[:] = self.bytes[key][offset : offset + len(memory)]
        return Ticket.completed(key)

    def promote(self, key: str) -> None:
        raise AssertionError("nobody waits for what is read")

    def nbytes_by_drive(self, key: str, start: int, stop: int) -> dict[int, int]:
        raise AssertionError("there is one drive")

    def land(self) -> None:
        if not self.last.done:
            self.last.set_done()


class PassingBench(Bench):
    """As `Bench`, with chunks."""

    def make_sink(self, **parts: Any) -> ChunkedGradientSink:
        def passage(budget: TierBudget) -> Passage:
            return Passage(
                store=None,
                pool=self.pool,
                budget=budget,
                chunk_numel=CHUNK_NUMEL,
                device=self.device,
                stalls=self.stalls,
            )

        return ChunkedGradientSink(
            passage=passage(TierBudget("passage", 0)),
            whole_passage=passage(parts["transit"]),
            **parts,
        )


def make_bench(store: Store, transit_nbytes: int = NBYTES, lasting: frozenset[int] = frozenset()) -> PassingBench:
    return PassingBench(0, store=store, transit_nbytes=transit_nbytes, n_spilled=3, lasting=lasting)


def close(bench: PassingBench, store: Store) -> None:
    store.land()
    bench.sink.check_writes()
    bench.sink.close()
    assert bench.pool.leased_nbytes == bench.device.budget.used_nbytes == 0
    bench.pool.close()


def values(store: Store, key: str, slot: int) -> torch.Tensor:
    """What the swap file holds of the gradient of a parameter."""
    place = wide(0).layout.slots[slot]
    return torch.frombuffer(store.bytes[key], dtype=torch.float32)[place.offset : place.stop]


def test_a_gradient_comes_down_beside_the_last_write_of_the_one_before() -> None:
    """There is room for one whole gradient, of which the one before holds a part until somebody writes on."""
    store = Store()
    bench = make_bench(store)
    _backward(bench, wide(2), wide(1), value=1.5)
    assert store.done == [f"write g{index}/grad {CHUNK_NBYTES}" for index in (2, 1) for _ in range(N_CHUNKS)]
    for index in (2, 1):
        for slot in (0, 1):
            assert values(store, f"g{index}/grad", slot).eq(1.5).all()
    close(bench, store)


def test_what_is_added_to_comes_back_whole() -> None:
    store = Store()
    bench = make_bench(store)
    group = wide(0)
    _backward(bench, group, value=1.0)
    store.land()
    del store.done[:]
    _backward(bench, group, value=2.0)
    assert store.done == [f"read g0/grad {NBYTES}", f"write g0/grad {NBYTES}"]
    assert values(store, "g0/grad", 0).eq(3.0).all()
    close(bench, store)


def test_a_part_of_a_gradient_comes_down_in_the_memory_of_all_of_it() -> None:
    store = Store()
    bench = make_bench(store)
    group = wide(0)
    set_fresh_grad(group.parameters[1], torch.full((30,), 4.0))
    bench.sink.harvest(group, is_final=True)
    bench.sink.settle(group)
    assert store.done == [f"write g0/grad {NBYTES}"]
    store.land()
    _backward(bench, group, value=1.0)
    assert values(store, "g0/grad", 0).eq(1.0).all()
    assert values(store, "g0/grad", 1).eq(5.0).all()
    close(bench, store)


@pytest.mark.parametrize("wanted", ["wants_norms", "wants_peaks"])
def test_what_is_measured_comes_down_whole(wanted: str) -> None:
    store = Store()
    bench = make_bench(store)
    setattr(bench.sink, wanted, True)
    group = wide(0)
    _backward(bench, group, value=2.0)
    assert store.done == [f"write g0/grad {NBYTES}"]
    store.land()
    if wanted == "wants_norms":
        assert float(bench.sink.norms([(group, 1)])[0]) == pytest.approx(2 * 30**0.5)
    else:
        assert not bench.sink.overflowed()
    assert len(store.done) == 1  # measured while it was there
    close(bench, store)


def test_what_waits_for_the_step_is_whole_and_makes_room_for_what_comes_after_it() -> None:
    """The plan knows units by their index; a loop may run them in another order."""
    store = Store(is_slow=False)
    bench = make_bench(store, lasting=frozenset({0}))
    _backward(bench, wide(0), wide(1), value=1.0)
    assert store.done == [f"write g0/grad {NBYTES}", *[f"write g1/grad {CHUNK_NBYTES}"] * N_CHUNKS]
    close(bench, store)


class Block(nn.Module):
    """Leaves out its second layer in every other call. The gradient of a layer is more than a chunk."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(x)
        if self.calls % 2:
            y = y + self.second(x)
        self.calls += 1
        return x + torch.tanh(y)


class Blocks(nn.Module):
    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 29, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("schedule", ["deferred", "synchronous"])
def test_bits_and_bytes_of_an_engine(offload: MakeEngine, schedule: str, max_norm: float | None) -> None:
    """Also of a parameter of which the first micro-batch of a step has no gradient and the second one has."""
    loop = Loop(Blocks, accumulate=(2,), steps=3, max_norm=max_norm)
    budgets: dict[str, Any] = {"host": {"budget": "24MiB"}, "device": {"kind": "cpu", "budget": "64MiB"}}
    engine = assert_parity(loop, offload, schedule=schedule, check_traffic=max_norm is None, **budgets)
    placement = engine.plan.placement
    assert placement.spilled_gradients - placement.lasting_gradients - placement.chunked
    assert not placement.chunked
    assert max(group.layout.numel for group in engine._runtime.groups) > 2 * TRANSIT_NUMEL
