"""Alignment arithmetic, pure. Sizes and offsets in bytes unless a name says otherwise."""

from collections.abc import Iterator

PAGE_NBYTES = 4096


def align_up(n: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `n`."""
    return -(-n // alignment) * alignment


def align_down(n: int, alignment: int) -> int:
    """The largest multiple of `alignment` that is at most `n`."""
    return n // alignment * alignment


def is_aligned(n: int, alignment: int = PAGE_NBYTES) -> bool:
    """Whether `n` is a multiple of `alignment`."""
    return n % alignment == 0


def split_blocks(offset: int, nbytes: int, block_nbytes: int) -> Iterator[tuple[int, int]]:
    """Cut a span into (offset, nbytes) blocks of at most `block_nbytes`, in order."""
    end = offset + nbytes
    while offset < end:
        size = min(block_nbytes, end - offset)
        yield offset, size
        offset += size
