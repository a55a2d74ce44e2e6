from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from storage.align import PAGE_NBYTES, align_down, align_up, is_aligned, split_blocks

_SIZES = st.integers(0, 1 << 50)
_ALIGNMENTS = st.integers(1, 1 << 21)


@given(_SIZES, _ALIGNMENTS)
def test_up_and_down_are_the_nearest_multiples(n: int, alignment: int) -> None:
    up, down = align_up(n, alignment), align_down(n, alignment)
    assert is_aligned(up, alignment)
    assert is_aligned(down, alignment)
    assert down <= n <= up
    assert up - down == (0 if is_aligned(n, alignment) else alignment)


def test_around_a_page() -> None:
    assert [align_up(n, PAGE_NBYTES) for n in (0, 1, 4095, 4096, 4097)] == [0, 4096, 4096, 4096, 8192]
    assert [is_aligned(n) for n in (0, 511, 512, 4096, 6144)] == [True, False, False, True, False]


@given(_SIZES, st.integers(0, 1 << 20), st.integers(1 << 12, 1 << 18))
def test_blocks_cover_a_span_without_gap_or_overlap(offset: int, nbytes: int, block: int) -> None:
    at = offset
    for start, size in split_blocks(offset, nbytes, block):
        assert start == at
        assert 0 < size <= block
        at += size
    assert at == offset + nbytes


def test_only_the_last_block_is_smaller() -> None:
    assert list(split_blocks(10, 25, 10)) == [(10, 10), (20, 10), (30, 5)]
    assert list(split_blocks(10, 0, 10)) == []
