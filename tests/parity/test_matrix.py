"""The bitwise matrix: schedule, chunk size, read-ahead, drives, budget, clipping. All give the bits of plain PyTorch.

The fast subset takes every value of every axis with every value of two others at least once; `slow` takes everything.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeEngine
from tests.covering import cover, pairs
from tests.parity.loops import Loop, Outcome, assert_same, assert_traffic, train_offloaded, train_plain
from tests.zoo import Net

AXES: dict[str, tuple[Any, ...]] = {
    "schedule": ("synchronous", "overlapped", "deferred"),
    "chunk": ("16KiB", "64KiB", None),
    "window_units": (0, 2, 8),  # host memory beyond the least: how far reads may run ahead
    "drives": (1, 2, 3),
    "budget": ("least", "half", "all"),  # of the state, in host memory
    "clip": ("none", "rare", "always"),
}
LOOP = Loop(Net, steps=4)


@dataclass(frozen=True)
class Cell:
    """One place of the matrix."""

    schedule: str
    chunk: str | None
    window_units: int
    drives: int
    budget: str
    clip: str

    @property
    def is_possible(self) -> bool:
        """Overlapped updates begin before the norm is known: clipping is refused."""
        return self.schedule != "overlapped" or self.clip == "none"

    def __str__(self) -> str:
        return "-".join(str(value) for value in vars(self).values())


CELLS = [cell for cell in itertools.starmap(Cell, itertools.product(*AXES.values())) if cell.is_possible]


FAST = [CELLS[number] for number in cover([vars(cell) for cell in CELLS])]


@cache
def _max_norm(clip: str) -> float | None:
    if clip == "none":
        return None
    norms = sorted(float(norm) for norm in train_plain(Loop(Net, steps=4, max_norm=1e9)).norms)
    return norms[-1] * 0.999 if clip == "rare" else norms[0] / 10


@cache
def _loop_and_outcome(clip: str) -> tuple[Loop, Outcome]:
    loop = Loop(Net, steps=4, max_norm=_max_norm(clip))
    return loop, train_plain(loop)


def _check(cell: Cell, offload: MakeEngine, folder: Path) -> None:
    loop, expected = _loop_and_outcome(cell.clip)
    paths = [folder / f"drive{number}" for number in range(cell.drives)]
    for path in paths:
        path.mkdir()
    extra = {"least": 0, "half": 120, "all": 480}[cell.budget] + 33 * cell.window_units
    settings: dict[str, Any] = {
        "schedule": cell.schedule,
        "chunk": cell.chunk,
        "host": {"budget": f"{340 + extra}KiB"},
        "nvme": {"paths": paths},
    }
    ours, engine = train_offloaded(loop, lambda model: offload(model, **settings), clip_in_optimizer=True)
    assert_same(expected, ours)
    assert_traffic(engine, loop)


@pytest.mark.parametrize("cell", FAST, ids=str)
def test_every_pair_of_settings_gives_the_bits_of_plain_pytorch(
    cell: Cell, offload: MakeEngine, tmp_path: Path
) -> None:
    _check(cell, offload, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in FAST], ids=str)
def test_every_other_place_of_the_matrix(cell: Cell, offload: MakeEngine, tmp_path: Path) -> None:
    _check(cell, offload, tmp_path)


def test_the_fast_subset_has_every_pair_and_is_small() -> None:
    found, possible = ({pair for cell in cells for pair in pairs(vars(cell))} for cells in (FAST, CELLS))
    assert found == possible
    assert len(FAST) <= 25
    assert len(CELLS) == 3**4 * (2 * 3 + 1)


def test_clipping_happens_as_often_as_it_says() -> None:
    clipped = {}
    for clip in ("rare", "always"):
        loop, outcome = _loop_and_outcome(clip)
        assert loop.max_norm is not None
        clipped[clip] = sum(float(norm) > loop.max_norm for norm in outcome.norms)
    assert clipped == {"rare": 1, "always": LOOP.steps}
