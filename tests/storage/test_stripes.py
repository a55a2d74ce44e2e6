from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from storage.stripes import Piece, join, overlap
from storage.types import Extent
from tests.storage.helpers import PAGE


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


def test_spans_that_touch_are_joined() -> None:
    assert join([]) == []
    assert join([(0, 2), (2, 5), (6, 7), (7, 8)]) == [(0, 5), (6, 8)]
