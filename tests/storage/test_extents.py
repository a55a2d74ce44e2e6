from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from storage.errors import SwapFullError
from storage.extents import ExtentAllocator
from tests.storage.helpers import PAGE


def test_the_best_fitting_span_is_taken() -> None:
    extents = ExtentAllocator(10 * PAGE)
    offsets = [extents.allocate(n * PAGE) for n in (3, 1, 2, 1, 3)]
    extents.free(offsets[0])
    extents.free(offsets[2])
    assert extents.allocate(2 * PAGE) == offsets[2]
    assert extents.allocate(3 * PAGE) == offsets[0]


def test_a_full_file_says_how_full() -> None:
    extents = ExtentAllocator(4 * PAGE)
    offsets = [extents.allocate(PAGE) for _ in range(4)]
    extents.free(offsets[0])
    extents.free(offsets[2])
    with pytest.raises(SwapFullError, match=r"8192 of 16384 bytes are free, the largest span is 4096"):
        extents.allocate(2 * PAGE)
    assert extents.free_nbytes == 2 * PAGE


def test_growing_extends_the_last_free_span() -> None:
    extents = ExtentAllocator(2 * PAGE)
    extents.allocate(PAGE)
    extents.grow(2 * PAGE)
    assert extents.allocate(3 * PAGE) == PAGE


@pytest.mark.parametrize("nbytes", [-PAGE, 0, 1, 511, 512, PAGE - 1, PAGE + 1, PAGE + 512, (1 << 20) + 1])
def test_sizes_that_are_no_page_multiple_are_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"{nbytes} bytes"):
        ExtentAllocator(1 << 30).allocate(nbytes)


def test_freeing_what_is_not_allocated_is_refused() -> None:
    extents = ExtentAllocator(4 * PAGE)
    offset = extents.allocate(PAGE)
    extents.free(offset)
    with pytest.raises(ValueError, match="no extent"):
        extents.free(offset)


class ExtentMachine(RuleBasedStateMachine):
    """Against a model that knows the owner of every page."""

    @initialize(pages=st.integers(0, 24))
    def start(self, pages: int) -> None:
        self.extents = ExtentAllocator(pages * PAGE)
        self.pages: list[int | None] = [None] * pages
        self.owned: dict[int, int] = {}

    @rule(pages=st.integers(1, 8))
    def allocate(self, pages: int) -> None:
        if pages > max(_runs(self.pages), default=0):
            with pytest.raises(SwapFullError):
                self.extents.allocate(pages * PAGE)
            return
        offset = self.extents.allocate(pages * PAGE)
        first = offset // PAGE
        assert self.pages[first : first + pages] == [None] * pages
        self.pages[first : first + pages] = [offset] * pages
        self.owned[offset] = pages

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.owned)))
        assert self.extents.free(offset) == self.owned.pop(offset) * PAGE
        self.pages = [None if owner == offset else owner for owner in self.pages]

    @rule(pages=st.integers(1, 4))
    def grow(self, pages: int) -> None:
        self.extents.grow(pages * PAGE)
        self.pages += [None] * pages

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.extents.capacity_nbytes == len(self.pages) * PAGE
        assert self.extents.free_nbytes == self.pages.count(None) * PAGE
        assert self.extents.largest_free_nbytes == max(_runs(self.pages), default=0) * PAGE
        assert self.extents.used() == sorted((offset, pages * PAGE) for offset, pages in self.owned.items())

    def teardown(self) -> None:
        for offset in list(getattr(self, "owned", {})):
            self.extents.free(offset)
        if hasattr(self, "extents"):  # everything came back, as one span
            assert self.extents.largest_free_nbytes == self.extents.capacity_nbytes


def _runs(pages: list[int | None]) -> list[int]:
    """Lengths of the free runs."""
    runs, run = [], 0
    for owner in [*pages, -1]:
        if owner is None:
            run += 1
        elif run:
            runs.append(run)
            run = 0
    return runs


TestExtentMachine = ExtentMachine.TestCase
TestExtentMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_restoring_and_splitting() -> None:
    allocator = ExtentAllocator.restore(16 * PAGE, [(8 * PAGE, 4 * PAGE), (2 * PAGE, PAGE)])
    assert allocator.used() == [(2 * PAGE, PAGE), (8 * PAGE, 4 * PAGE)]
    assert (allocator.free_nbytes, allocator.largest_free_nbytes) == (11 * PAGE, 5 * PAGE)
    allocator.split(8 * PAGE, PAGE)
    allocator.split(9 * PAGE, 2 * PAGE)
    assert allocator.free(9 * PAGE) == 2 * PAGE
    assert allocator.allocate(2 * PAGE) in (0, 9 * PAGE)
    assert ExtentAllocator.restore(4 * PAGE, []).allocate(4 * PAGE) == 0
    assert ExtentAllocator.restore(0, []).free_nbytes == 0


@pytest.mark.parametrize(
    "used",
    [
        [(0, 2 * PAGE), (PAGE, PAGE)],
        [(3 * PAGE, 2 * PAGE)],
        [(0, 0)],
        [(100, PAGE)],
        [(0, 100)],
        [(-PAGE, PAGE)],
    ],
)
def test_spans_that_cannot_be_are_refused(used: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="overlap others, or leave"):
        ExtentAllocator.restore(4 * PAGE, used)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 0), (0, 4 * PAGE), (0, 100), (PAGE, PAGE), (0, -PAGE)])
def test_splits_that_cannot_be_are_refused(offset: int, nbytes: int) -> None:
    allocator = ExtentAllocator.restore(8 * PAGE, [(0, 4 * PAGE)])
    with pytest.raises(ValueError, match="cannot be split"):
        allocator.split(offset, nbytes)
