"""Where the bytes of a key lie: in pieces, each in one span of one drive's file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from storage.types import Extent


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start` to `start + extent.nbytes` of a key lie in `extent`."""

    start: int
    extent: Extent

    @property
    def stop(self) -> int:
        """The byte of the key behind its last one."""
        return self.start + self.extent.nbytes


def overlap(pieces: Sequence[Piece], start: int, stop: int) -> list[tuple[Piece, int, int]]:
    """The parts of a key's span by piece, as (piece, start, stop) in bytes of the key."""
    return [
        (piece, max(start, piece.start), min(stop, piece.stop))
        for piece in pieces
        if piece.start < stop and start < piece.stop
    ]


def join(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans (start, stop) in order, with those that touch made one."""
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
