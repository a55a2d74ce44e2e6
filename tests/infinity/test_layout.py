"""Flat layout: slots at kernel boundaries, pages at the end, chunks that cover every element exactly once."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.layout import SHARD_ALIGN_NUMEL, SLOT_ALIGN_NUMEL, FlatLayout
from storage.align import PAGE_NBYTES

SHAPES = st.lists(st.lists(st.integers(0, 90), max_size=3).map(tuple), max_size=12)
CHUNKS = st.integers(1, 6).map(lambda pages: pages * SHARD_ALIGN_NUMEL)


def pack(shapes: list[tuple[int, ...]], world_size: int = 1) -> FlatLayout:
    return FlatLayout.pack(((f"p{number}", shape) for number, shape in enumerate(shapes)), world_size)


@given(SHAPES)
def test_slots_follow_one_another_at_kernel_boundaries(shapes: list[tuple[int, ...]]) -> None:
    layout = pack(shapes)
    assert [slot.name for slot in layout.slots] == [f"p{number}" for number in range(len(shapes))]
    assert [slot.shape for slot in layout.slots] == shapes
    end = 0
    for slot in layout.slots:
        assert slot.numel == math.prod(slot.shape)
        assert slot.offset % SLOT_ALIGN_NUMEL == 0
        assert end <= slot.offset < end + SLOT_ALIGN_NUMEL
        end = slot.stop
    assert end <= layout.numel
    assert layout.payload_numel == sum(math.prod(shape) for shape in shapes)


@given(SHAPES, st.integers(1, 5))
def test_every_rank_gets_whole_pages_and_no_more_than_needed(shapes: list[tuple[int, ...]], world_size: int) -> None:
    layout = pack(shapes, world_size)
    share, rest = divmod(layout.numel, world_size)
    assert rest == 0
    assert share > 0
    for itemsize in (1, 2, 4, 8):
        assert share * itemsize % PAGE_NBYTES == 0
    end = max((slot.stop for slot in layout.slots), default=0)
    assert layout.numel - max(end, 1) < SHARD_ALIGN_NUMEL * world_size + SLOT_ALIGN_NUMEL


@given(SHAPES, CHUNKS)
def test_chunks_tile_the_buffer(shapes: list[tuple[int, ...]], chunk_numel: int) -> None:
    layout = pack(shapes)
    chunks = layout.cut(chunk_numel)
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])]
    assert chunks[-1].stop == layout.numel
    assert all(chunk.numel == chunk_numel for chunk in chunks[:-1])
    assert 0 < chunks[-1].numel <= chunk_numel


@given(SHAPES, CHUNKS)
def test_chunks_cover_every_parameter_element_exactly_once(shapes: list[tuple[int, ...]], chunk_numel: int) -> None:
    layout = pack(shapes)
    covered: list[list[tuple[int, int]]] = [[] for _ in layout.slots]
    for chunk in layout.cut(chunk_numel):
        for piece in chunk.pieces:
            assert 0 <= piece.start < piece.stop <= chunk.numel
            covered[piece.slot].append((chunk.start + piece.start, chunk.start + piece.stop))
    for slot, spans in zip(layout.slots, covered, strict=True):
        starts, stops = [start for start, _ in spans], [stop for _, stop in spans]
        if slot.numel:
            assert (starts[0], stops[-1]) == (slot.offset, slot.stop)
        assert starts[1:] == stops[:-1]


@given(SHAPES, CHUNKS)
def test_pieces_start_where_the_kernel_gives_the_same_bits(shapes: list[tuple[int, ...]], chunk_numel: int) -> None:
    layout = pack(shapes)
    chunks = layout.cut(chunk_numel)
    for chunk in chunks:
        for piece in chunk.pieces:
            slot = layout.slots[piece.slot]
            assert (chunk.start + piece.start - slot.offset) % SLOT_ALIGN_NUMEL == 0
        assert [piece.slot for piece in chunk.pieces] == sorted({piece.slot for piece in chunk.pieces})
        assert chunk.payload_numel == sum(piece.stop - piece.start for piece in chunk.pieces)
    assert sum(chunk.payload_numel for chunk in chunks) == layout.payload_numel


def test_scalars_and_empty_parameters_have_slots() -> None:
    layout = pack([(), (0, 5), (3,)])
    assert [(slot.offset, slot.numel) for slot in layout.slots] == [(0, 1), (64, 0), (64, 3)]
    (chunk,) = layout.cut(SHARD_ALIGN_NUMEL)
    assert [piece.slot for piece in chunk.pieces] == [0, 2]


def test_nothing_at_all_is_one_page_of_padding() -> None:
    layout = pack([])
    assert (layout.numel, layout.payload_numel) == (SHARD_ALIGN_NUMEL, 0)
    (chunk,) = layout.cut(4 * SHARD_ALIGN_NUMEL)
    assert (chunk.numel, chunk.pieces) == (SHARD_ALIGN_NUMEL, ())


@pytest.mark.parametrize("chunk_numel", [0, -SHARD_ALIGN_NUMEL, 1, SHARD_ALIGN_NUMEL + 64])
def test_chunks_that_are_not_pages_are_refused(chunk_numel: int) -> None:
    with pytest.raises(ValueError, match=f"chunk_numel is {chunk_numel}; .*multiple of {SHARD_ALIGN_NUMEL}"):
        pack([(5,)]).cut(chunk_numel)
