"""Whatever the sizes, windows, latencies and orders: newest bytes, budgets kept, no deadlock."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity.layout import SHARD_ALIGN_NUMEL
from infinity.testing import SimulatedStore, run_virtual
from storage.types import Op
from tests.scheduler.simulation import Simulation

PAGE = SHARD_ALIGN_NUMEL * 4


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pages=st.lists(st.integers(1, 4), min_size=1, max_size=7),
    spare=st.integers(0, 6),
    overlapped=st.booleans(),
    chunks=st.integers(1, 3),
    keep=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    seed=st.integers(0, 2**32),
)
def test_any_timing_any_order(
    pages: list[int], spare: int, overlapped: bool, chunks: int, keep: tuple[int, int], seed: int
) -> None:
    chance = random.Random(seed)
    window_nbytes = (max(pages) + spare) * PAGE
    at_turn, at_boundary = _kept(pages, spare, keep)

    async def main(path: Path) -> None:
        simulation = Simulation(
            path,
            pages,
            window_nbytes=window_nbytes,
            overlapped=overlapped,
            pipeline_chunks=chunks,
            keep_at_turn=at_turn,
            keep_at_boundary=at_boundary,
            compute_s=lambda access: chance.choice([0.0, 0.5, 20.0]),
            store=SimulatedStore(duration_s=lambda op, key, nbytes: chance.choice([0.0, 0.1, 3.0, 50.0])),
        )
        for step in range(3):
            order = [unit for unit in range(len(pages)) if step == 0 or chance.random() < 0.8]
            if step == 2:
                chance.shuffle(order)
            await simulation.train_step(order)
        assert simulation.window.peak_nbytes <= window_nbytes
        assert simulation.pool.peak_nbytes <= simulation.pool.capacity_nbytes
        assert simulation.gpu.peak_nbytes <= max(pages) * PAGE
        await simulation.close()

    with tempfile.TemporaryDirectory() as folder:
        run_virtual(main(Path(folder)))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pages=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    spare=st.integers(0, 8),
    overlapped=st.booleans(),
    keep=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    seed=st.integers(0, 2**32),
)
def test_bytes_of_a_step_are_a_closed_form(
    pages: list[int], spare: int, overlapped: bool, keep: tuple[int, int], seed: int
) -> None:
    chance = random.Random(seed)
    at_turn, at_boundary = _kept(pages, spare, keep)

    async def main(path: Path) -> None:
        simulation = Simulation(
            path,
            pages,
            window_nbytes=(max(pages) + spare) * PAGE,
            overlapped=overlapped,
            keep_at_turn=at_turn,
            keep_at_boundary=at_boundary,
            compute_s=lambda access: chance.choice([0.0, 0.5, 20.0]),
            store=SimulatedStore(duration_s=lambda op, key, nbytes: chance.choice([0.0, 0.1, 3.0, 50.0])),
        )
        for _ in range(3):
            await simulation.train_step()
        await simulation.settle()
        for step in range(3):
            assert simulation.read_nbytes(step) == PAGE * _closed_form(step)
            written = sum(t.nbytes for t in simulation.store.log if t.op is Op.WRITE and t.tag.step == step)
            assert written == 2 * PAGE * sum(pages)
        await simulation.close()

    def _closed_form(step: int) -> int:
        total = 0
        for unit, count in enumerate(pages):
            forward = step == 0 or unit not in at_boundary
            backward = unit not in at_turn
            update = not overlapped and unit not in at_boundary
            total += count * (forward + backward + update)
        return total

    with tempfile.TemporaryDirectory() as folder:
        run_virtual(main(Path(folder)))


def _kept(pages: list[int], spare: int, keep: tuple[int, int]) -> tuple[list[int], list[int]]:
    """As the placement chooses: beside what is kept there is room for the largest."""
    chosen: list[list[int]] = []
    for units, wanted in ((range(len(pages) - 1, -1, -1), keep[0]), (range(len(pages)), keep[1])):
        total = 0
        kept: list[int] = []
        for unit in units:
            total += pages[unit]
            if total > spare or len(kept) == wanted:
                break
            kept.append(unit)
        chosen.append(kept)
    return chosen[0], chosen[1]
