from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from storage.stripes import Piece, overlap, share_sizes
from storage.types import Extent
from tests.storage.helpers import MIB, PAGE


@given(st.integers(1, 1 << 16), st.integers(1, 8), st.integers(0, 7))
def test_shares_are_even_page_multiples_that_add_up(pages: int, drives: int, first: int) -> None:
    shares = share_sizes(pages * PAGE, drives, first % drives)
    assert sum(nbytes for _, nbytes in shares) == pages * PAGE
    assert len({drive for drive, _ in shares}) == len(shares) <= drives
    assert all(nbytes > 0 and nbytes % PAGE == 0 for _, nbytes in shares)
    sizes = [nbytes for _, nbytes in shares]
    assert max(sizes) - min(sizes) < len(sizes) * PAGE


def test_small_keys_stay_on_one_drive_and_rotate() -> None:
    assert share_sizes(MIB, 4, 2) == [(2, MIB)]
    assert share_sizes(2 * MIB, 4, 3) == [(3, MIB), (0, MIB)]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_parts_of_a_span_cover_it_in_order(pieces_pages: list[int], data: st.DataObject) -> None:
    pieces, start = [], 0
    for drive, pages in enumerate(pieces_pages):
        pieces.append(Piece(start, Extent(drive, 0, pages * PAGE)))
        start += pages * PAGE
    first = data.draw(st.integers(0, start - 1))
    stop = data.draw(st.integers(first + 1, start))
    at = first
    for piece, part_start, part_stop in overlap(pieces, first, stop):
        assert part_start == at < part_stop
        assert piece.start <= part_start
        assert part_stop <= piece.stop
        at = part_stop
    assert at == stop
