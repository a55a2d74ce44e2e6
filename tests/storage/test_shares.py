from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.shares import (
    MIN_PIECE_NBYTES,
    QUANTUM_NBYTES,
    Measured,
    better_split,
    part_of,
    rotated,
    speeds_of,
    split,
)
from storage.types import Op
from tests.storage.helpers import MIB, PAGE

_SPEEDS = st.lists(st.sampled_from([0.0, 1.0, 50.0, 200.0, 3e9]), min_size=1, max_size=6).filter(any)


@given(st.integers(1, 1 << 14), _SPEEDS, st.integers(0, 5))
def test_shares_are_page_multiples_that_add_up(pages: int, speeds: list[float], first: int) -> None:
    nbytes = pages * PAGE
    shares = split(nbytes, speeds, [0] * len(speeds), rotated(len(speeds), first))
    assert sum(part for _, part in shares) == nbytes
    assert len({drive for drive, _ in shares}) == len(shares)
    assert all(part > 0 and part % PAGE == 0 and speeds[drive] for drive, part in shares)
    if len(shares) > 1:
        assert all(part >= MIN_PIECE_NBYTES - QUANTUM_NBYTES for _, part in shares)
        total = sum(speeds[drive] for drive, _ in shares)
        for drive, part in shares:
            assert abs(part - nbytes * speeds[drive] / total) <= QUANTUM_NBYTES


def test_pieces_are_in_proportion_to_speeds() -> None:
    assert split(10 * MIB, [200, 50], [0, 0]) == [(0, 8 * MIB), (1, 2 * MIB)]
    assert split(10 * MIB, [200, 50], [0, 0], [1, 0]) == [(1, 2 * MIB), (0, 8 * MIB)]
    assert split(10 * MIB, [200, 0, 50], [0, 0, 0]) == [(0, 8 * MIB), (2, 2 * MIB)]
    assert split(4 * MIB + PAGE, [1, 1], [0, 0]) == [(0, 2 * MIB), (1, 2 * MIB + PAGE)]


def test_small_keys_are_in_proportion_to_speeds_all_together() -> None:
    held = [0, 0]
    for _ in range(50):
        ((drive, nbytes),) = split(PAGE, [200, 50], held)
        held[drive] += nbytes
    assert held == [40 * PAGE, 10 * PAGE]


def test_somebody_has_to_take_it() -> None:
    with pytest.raises(ValueError, match="none can take anything"):
        split(PAGE, [0.0, 0.0], [0, 0])


def test_a_span_moves_only_when_it_is_clearly_faster() -> None:
    held = [4 * MIB, 4 * MIB]
    assert better_split({0: 4 * MIB, 1: 4 * MIB}, [1.0, 1.0], held) is None
    assert better_split({0: 4 * MIB, 1: 4 * MIB}, [1.1, 1.0], held) is None  # 5 % faster
    assert better_split({0: 4 * MIB, 1: 4 * MIB}, [3.0, 1.0], held) == [(0, 6 * MIB), (1, 2 * MIB)]
    assert better_split({0: 8 * MIB}, [1.0, 1.0], [8 * MIB, 0]) == [(0, 4 * MIB), (1, 4 * MIB)]
    assert better_split({1: 8 * MIB}, [1.0, 0.0], [0, 8 * MIB]) == [(0, 8 * MIB)]


def test_a_small_key_moves_only_when_all_together_are_faster() -> None:
    assert better_split({1: PAGE}, [200, 50], [4 * MIB, MIB]) is None  # the drives are done at the same time
    assert better_split({1: PAGE}, [200, 50], [MIB, MIB]) == [(0, PAGE)]
    assert better_split({0: PAGE}, [200, 50], [4 * MIB, 0]) == [(1, PAGE)]


def test_a_better_layout_keeps_the_order_of_the_drives() -> None:
    held = [8 * MIB, 8 * MIB]
    assert better_split({1: 8 * MIB, 0: 8 * MIB}, [3.0, 1.0], held) == [(1, 4 * MIB), (0, 12 * MIB)]


def test_chunks_of_shares() -> None:
    shares = [(1, 4 * MIB), (0, 12 * MIB)]
    assert part_of(shares, 0, 16 * MIB) == shares
    assert part_of(shares, 0, 4 * MIB) == [(1, 4 * MIB)]
    assert part_of(shares, 2 * MIB, 8 * MIB) == [(1, 2 * MIB), (0, 4 * MIB)]
    assert part_of(shares, 4 * MIB - PAGE, 8 * MIB) == [(0, 4 * MIB + PAGE)]  # a page is not worth an operation
    assert part_of(shares, MIB, 4 * MIB + PAGE) == [(1, 3 * MIB + PAGE)]
    assert part_of([(0, MIB), (1, PAGE), (2, MIB)], 0, 2 * MIB + PAGE) == [(0, MIB + PAGE), (2, MIB)]


@given(st.lists(st.integers(1, 1 << 12), min_size=1, max_size=5), st.data())
def test_chunks_cover_their_span(pages: list[int], data: st.DataObject) -> None:
    shares = [(drive, part * PAGE) for drive, part in enumerate(pages)]
    total = sum(pages)
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    parts = part_of(shares, start * PAGE, stop * PAGE)
    assert sum(part for _, part in parts) == (stop - start) * PAGE
    assert len(parts) == 1 or min(part for _, part in parts) >= QUANTUM_NBYTES
    assert [drive for drive, _ in parts] == sorted({drive for drive, _ in parts})


def test_of_equal_drives_those_that_hold_a_key_keep_it() -> None:
    """Three of four take it; another three, in another order, would be cut luckier by the quantum of pieces."""
    speeds = [3325375676.0, 3325375676.0, 3325375676.0, 3547067410.0]
    for first in range(4):
        shares = better_split({first: 1031 * PAGE}, speeds, [1031 * PAGE * (drive == first) for drive in range(4)])
        assert shares is not None
        held = dict(shares)
        assert len(held) == 3
        assert better_split(held, speeds, [held.get(drive, 0) for drive in range(4)]) is None


@given(st.lists(st.floats(1, 1e10), min_size=2, max_size=4), st.integers(1, 4096), st.data())
def test_a_better_layout_is_not_improved_again(speeds: list[float], pages: int, data: st.DataObject) -> None:
    held = [data.draw(st.integers(0, 1 << 34)) for _ in speeds]
    present = {data.draw(st.integers(0, len(speeds) - 1)): pages * PAGE}
    for drive, nbytes in present.items():
        held[drive] += nbytes
    shares = better_split(present, speeds, held)
    if shares is not None:
        for drive, nbytes in present.items():
            held[drive] -= nbytes
        for drive, nbytes in shares:
            held[drive] += nbytes
        assert better_split(dict(shares), speeds, held) is None


def _measured(*speeds: float | None, moved_nbytes: int = 1, at_most: tuple[float, ...] | None = None) -> Measured:
    return Measured(speeds, at_most or tuple(math.inf for _ in speeds), moved_nbytes)


def test_speeds_count_both_directions_by_what_was_moved() -> None:
    nothing = _measured(None, None, moved_nbytes=0)
    assert speeds_of({Op.READ: nothing, Op.WRITE: nothing}, [1, 1]) is None
    assert speeds_of({Op.READ: _measured(200, 50), Op.WRITE: nothing}, [1, 1]) == pytest.approx([200, 50])
    both = {Op.READ: _measured(200, 50, moved_nbytes=3), Op.WRITE: _measured(100, 50, moved_nbytes=1)}
    assert speeds_of(both, [1, 1]) == pytest.approx([4 / (3 / 200 + 1 / 100), 50])


def test_a_drive_that_was_not_measured_is_what_it_was_said_to_be() -> None:
    assert speeds_of({Op.WRITE: _measured(200, None)}, [1, 1]) == pytest.approx([200, 200])
    assert speeds_of({Op.WRITE: _measured(200, None)}, [4, 1]) == pytest.approx([200, 50])


def test_a_drive_that_does_not_answer_is_as_slow_as_it_looks() -> None:
    assert speeds_of({Op.WRITE: _measured(200, 50, at_most=(math.inf, 3))}, [1, 1]) == pytest.approx([200, 3])
