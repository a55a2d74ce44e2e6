"""One logical space over several drives: a key's bytes are cut into one piece per drive, in equal page multiples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from storage.align import PAGE_NBYTES, align_up
from storage.types import Extent

_MIN_PIECE_NBYTES = 1 << 20  # smaller pieces cost more operations than a second drive gains


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start` to `start + extent.nbytes` of a key lie in `extent`."""

    start: int
    extent: Extent

    @property
    def stop(self) -> int:
        return self.start + self.extent.nbytes


def share_sizes(nbytes: int, drives: int, first: int) -> list[tuple[int, int]]:
    """How many bytes of a key go to which drive, as (drive, nbytes), in the order of the key's bytes.

    Args:
        nbytes: size of the key, a page multiple.
        first: drive of the first piece; it rotates from key to key, so that small keys spread too.
    """
    count = max(1, min(drives, nbytes // _MIN_PIECE_NBYTES))
    piece = align_up(-(-nbytes // count), PAGE_NBYTES)
    shares = []
    left = nbytes
    for number in range(count):
        size = min(piece, left)
        if size:
            shares.append(((first + number) % drives, size))
        left -= size
    return shares


def overlap(pieces: Sequence[Piece], start: int, stop: int) -> list[tuple[Piece, int, int]]:
    """The parts of a key's span by piece, as (piece, start, stop) in bytes of the key."""
    return [
        (piece, max(start, piece.start), min(stop, piece.stop))
        for piece in pieces
        if piece.start < stop and start < piece.stop
    ]
