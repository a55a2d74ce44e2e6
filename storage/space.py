"""The space of a store: where on its drives the bytes of keys lie, and where they go when they are written again.

Every write of a key may put the bytes it covers elsewhere, because nothing of them is kept: it costs no extra transfer.
That is how bytes leave a drive that has become slow, or that takes no writes any more, and how a versioned store keeps
what it has committed. The old extents are given back when the write has ended. No read of them is in flight then:
reads from before it have ended before it began, and later ones find the new place.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from storage.drives import Drive, StorageOptions
from storage.errors import SwapFullError
from storage.health import DriveHealth, DriveState
from storage.holds import Holds
from storage.meters import DriveMeters, Reading
from storage.shares import MIN_PIECE_NBYTES, better_split, part_of, rotated, speeds_of, split
from storage.stripes import Piece, join, overlap
from storage.types import Extent, Op

_ROOM_FRACTION = 4  # a move makes a file longer only if less than one part in so many of it is free


class _LimitError(SwapFullError):
    """The files may not become longer, whatever room their drives have."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a key lies after a write was placed, and the extents to give back when the write has ended."""

    pieces: Sequence[Piece]
    left: Sequence[Extent] = ()


@dataclass(frozen=True, slots=True)
class DriveReport:
    """What one drive of a store has done and holds.

    Attributes:
        held_nbytes, capacity_nbytes: of its swap file: in use, and reserved on disk.
        read, write: bytes moved, time in which something was in flight, and measured speed.
        state: whether it takes new bytes; `cause` says why not.
    """

    directory: str
    held_nbytes: int
    capacity_nbytes: int
    read: Reading
    write: Reading
    state: DriveState
    cause: str


class Space:
    """Allocates, moves and frees the pieces of keys. Not thread safe: its store's lock guards it.

    Args:
        speeds: of the drives, in any unit, until they are measured.
        options: how long the files may become together, and when a full drive is tried again.
        meters, health: others than those of the machine's time, for tests.
    """

    def __init__(
        self,
        drives: Sequence[Drive],
        speeds: Sequence[float],
        *,
        options: StorageOptions | None = None,
        meters: DriveMeters | None = None,
        health: DriveHealth | None = None,
    ) -> None:
        self.drives = tuple(drives)
        self.meters = meters or DriveMeters(len(drives))
        options = options or StorageOptions()
        self.health = health or DriveHealth([drive.directory for drive in drives], retry_full_s=options.retry_full_s)
        self.holds = Holds()
        self._given = speeds
        self._files_nbytes = options.files_nbytes
        self._first = 0
        self.held_nbytes = [sum(nbytes for _, nbytes in drive.file.extents.used()) for drive in drives]

    def allocate(self, start: int, nbytes: int, avoid: Collection[int] = ()) -> list[Piece]:
        """Room for a span of a key, spread by speed over the drives but those to avoid.

        Raises:
            SwapFullError: there is none on any drive; nothing was taken.
        """
        pieces: list[Piece] = []
        closed = set(avoid)
        problems: dict[int, SwapFullError] = {}
        spans = [(start, nbytes)]
        speeds = self._speeds() or self._given
        try:
            while spans:
                at, size = spans.pop()
                takers = self._takers(closed)
                if not takers:
                    pieces += self._take_fragments(at, size, avoid, problems)
                    continue
                weights = [speed if drive in takers else 0.0 for drive, speed in enumerate(speeds)]
                for drive, part in split(size, weights, self.held_nbytes, rotated(len(self.drives), self._first)):
                    try:
                        pieces.append(Piece(at, self._take(drive, part)))
                    except SwapFullError as error:
                        problems[drive] = error
                        closed.add(drive)
                        spans.append((at, part))
                    at += part
        except BaseException:
            self.free([piece.extent for piece in pieces])
            raise
        for drive, problem in problems.items():
            if not isinstance(problem, _LimitError):
                self.health.note_crowded(drive, problem)  # the others have room, or this would not be reached
        self._first = (self._first + len(pieces)) % len(self.drives)
        return sorted(pieces, key=lambda piece: piece.start)

    def hold(self, pieces: Sequence[Piece]) -> int:
        """Keep what lies in these pieces as it is until `let_go` is called with the number that this returns."""
        return self.holds.hold([piece.extent for piece in pieces])

    def let_go(self, number: int) -> None:
        """End a hold: extents that no key uses any more are given back. Idempotent."""
        self._give_back(self.holds.let_go(number))

    def free(self, extents: Sequence[Extent]) -> None:
        """Give extents back; those that are held, when the hold ends."""
        self._give_back(self.holds.keep_back(extents))

    @property
    def room_nbytes(self) -> int:
        """Bytes that could be allocated more, files that may be made longer included."""
        free_nbytes = sum(drive.file.extents.free_nbytes for drive in self.drives)
        growth = {os.fstat(drive.file.fd).st_dev: drive.file.room_nbytes for drive in self.drives}
        room_nbytes = sum(growth.values())
        if self._files_nbytes is not None:
            room_nbytes = min(room_nbytes, max(0, self._files_nbytes - self._files_total_nbytes))
        return free_nbytes + room_nbytes

    def _give_back(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            self.drives[extent.drive].file.extents.free(extent.offset)
            self.held_nbytes[extent.drive] -= extent.nbytes

    def place(self, pieces: Sequence[Piece], start: int, stop: int) -> Layout:
        """Decide where a write of bytes `start` to `stop` of a key goes.

        Raises:
            SwapFullError: bytes that have to go elsewhere find no room; nothing has changed.
        """
        covered = overlap(pieces, start, stop)
        better = self._place_better(pieces, covered)
        if better is not None:
            return self._put(pieces, [(start, stop)], better)
        spans = join([(a, b) for piece, a, b in covered if self._has_to_go(piece)])
        if not spans:
            return Layout(pieces)
        try:
            new = self._allocate_all(spans, avoid=self._refusing())
        except SwapFullError:
            if all(self._may_stay(piece) for piece, _, _ in covered):
                return Layout(pieces)  # a drive that takes no writes is still better than none
            # The last resort for bytes that must not be overwritten: also drives that have refused before.
            spans = join([(a, b) for piece, a, b in covered if not self._may_stay(piece)])
            new = self._allocate_all(spans)
        return self._put(pieces, spans, new)

    def replace(
        self, pieces: Sequence[Piece], spans: Sequence[tuple[int, int]], refused_by: Collection[int], error: Exception
    ) -> Layout:
        """Another place for parts of a key that some drives refused, the last one with `error`.

        Raises:
            SwapFullError: there is no room elsewhere; nothing has changed.
            Exception: `error`, when no other drive is left and the reason was not a lack of room.
        """
        if len(self.drives) == 1 or (len(refused_by) == len(self.drives) and not isinstance(error, SwapFullError)):
            raise error
        try:
            new = self._allocate_all(spans, avoid=refused_by)
        except SwapFullError as full:
            if isinstance(error, SwapFullError):
                full.path, full.offset, full.nbytes, full.errno, full.key = (
                    *(error.path, error.offset, error.nbytes),
                    *(error.errno, error.key),
                )
            raise full from error
        return self._put(pieces, spans, new)

    def note_written(self, pieces: Sequence[Piece], start: int, stop: int) -> None:
        """Bytes of a key were written successfully."""
        if self.health.is_any_full:
            for piece, _, _ in overlap(pieces, start, stop):
                self.health.note_written(piece.extent.drive)

    def report(self) -> list[DriveReport]:
        """What each drive has done and holds, and whether it takes new bytes."""
        return [
            DriveReport(
                str(drive.directory),
                self.held_nbytes[number],
                drive.file.extents.capacity_nbytes,
                self.meters.reading(number, Op.READ),
                self.meters.reading(number, Op.WRITE),
                self.health.state(number),
                self.health.cause(number),
            )
            for number, drive in enumerate(self.drives)
        ]

    # Parts -----------------------------------------------------------------------------------------------------

    def _may_stay(self, piece: Piece) -> bool:
        """Whether the bytes of a piece may be overwritten where they are."""
        return not self.holds.covers(piece.extent)

    def _allocate_all(self, spans: Sequence[tuple[int, int]], avoid: Collection[int] = ()) -> list[Piece]:
        pieces: list[Piece] = []
        try:
            for start, stop in spans:
                pieces += self.allocate(start, stop - start, avoid)
        except BaseException:
            self.free([piece.extent for piece in pieces])
            raise
        return pieces

    def _split(self, drive: int, offset: int, nbytes: int) -> None:
        """Make two of an extent."""
        self.drives[drive].file.extents.split(offset, nbytes)

    def _take(self, drive: int, nbytes: int, *, may_grow: bool = True) -> Extent:
        file = self.drives[drive].file
        try:
            offset = file.extents.allocate(nbytes)
        except SwapFullError:
            if not may_grow:
                raise
            self._grow(drive, nbytes - file.extents.free_tail_nbytes)
            offset = file.extents.allocate(nbytes)
        self.held_nbytes[drive] += nbytes
        return Extent(drive, offset, nbytes)

    def _grow(self, drive: int, nbytes: int) -> None:
        if not self._is_within_limit(nbytes):
            raise _LimitError(
                f"the swap files take {self._files_total_nbytes} bytes together and need {nbytes} more, which is "
                f"beyond their limit of {self._files_nbytes} bytes. Raise it (nvme.budget), or give more host memory",
                path=str(self.drives[drive].file.path),
            )
        self.drives[drive].file.grow(nbytes)
        self.health.note_grown(drive)

    @property
    def _files_total_nbytes(self) -> int:
        return sum(drive.file.extents.capacity_nbytes for drive in self.drives)

    def _is_within_limit(self, nbytes: int) -> bool:
        """Whether the files may become longer by so much."""
        return self._files_nbytes is None or self._files_total_nbytes + nbytes <= self._files_nbytes

    def _take_fragments(
        self, at: int, nbytes: int, avoid: Collection[int], problems: Mapping[int, SwapFullError]
    ) -> list[Piece]:
        """Room in whatever is free, when no drive has it in one part."""
        pieces: list[Piece] = []
        left = nbytes
        while left:
            sizes = {
                number: drive.file.extents.largest_free_nbytes
                for number, drive in enumerate(self.drives)
                if number not in avoid
            }
            drive = max(sizes, key=lambda number: sizes[number], default=None)
            if drive is None or not sizes[drive]:
                self.free([piece.extent for piece in pieces])
                raise self._full(nbytes, problems)
            pieces.append(Piece(at, self._take(drive, min(left, sizes[drive]), may_grow=False)))
            at, left = pieces[-1].stop, left - pieces[-1].extent.nbytes
        return pieces

    def _full(self, nbytes: int, problems: Mapping[int, SwapFullError]) -> SwapFullError:
        first = next(iter(problems.values()), None)
        if first is not None and len(self.drives) == 1:
            return first
        have = []
        limit = next((problem for problem in problems.values() if isinstance(problem, _LimitError)), None)
        for number, drive in enumerate(self.drives):
            problem = problems.get(number)
            why = self.health.cause(number) if problem is None or isinstance(problem, _LimitError) else problem
            have.append(
                f"{drive.directory} has {drive.file.extents.free_nbytes} of {drive.file.extents.capacity_nbytes} bytes "
                f"free in its swap file{f' ({why})' if why else ''}"
            )
        advice = "Free space on one of them, or add a directory" if limit is None else str(limit)
        return SwapFullError(
            f"no drive has room for {nbytes} bytes: {'; '.join(have)}. {advice}",
            path=first.path if first is not None else "",
            errno=first.errno if first is not None else None,
        )

    def _refusing(self) -> set[int]:
        return {drive for drive in range(len(self.drives)) if not self.health.takes_writes(drive)}

    def _takers(self, closed: Collection[int]) -> set[int]:
        """Drives to try: those that take writes, and when there are none, those that have refused before."""
        others = set(range(len(self.drives))) - set(closed)
        return {drive for drive in others if self.health.takes_writes(drive)} or others

    def _has_to_go(self, piece: Piece) -> bool:
        return not self._may_stay(piece) or not self.health.takes_writes(piece.extent.drive)

    def _speeds(self) -> list[float] | None:
        return speeds_of(self.meters.measured(), self._given) if len(self.drives) > 1 else None

    def _place_better(self, pieces: Sequence[Piece], covered: Sequence[tuple[Piece, int, int]]) -> list[Piece] | None:
        """New pieces for a span whose key is faster with them; None to leave it where it is.

        See `part_of` for spans that are a part of their key.
        """
        start, stop = covered[0][1], covered[-1][2]
        is_whole = (start, stop) == (0, pieces[-1].stop)
        if len(self.drives) == 1 or not (is_whole or stop - start >= 2 * MIN_PIECE_NBYTES):
            return None
        speeds = self._speeds()
        if speeds is None:
            return None
        refusing = self._refusing()
        speeds = [0.0 if drive in refusing else speed for drive, speed in enumerate(speeds)]
        if not any(speeds):
            return None
        present: dict[int, int] = {}
        for piece in pieces:
            present[piece.extent.drive] = present.get(piece.extent.drive, 0) + piece.extent.nbytes
        shares = better_split(present, speeds, self.held_nbytes)
        if shares is None:
            return None
        parts = part_of(shares, start, stop)
        if parts == [(piece.extent.drive, b - a) for piece, a, b in covered]:
            return None
        return None if self._is_scattered(pieces, covered, len(parts)) else self._take_exactly(start, parts)

    def _is_scattered(
        self, pieces: Sequence[Piece], covered: Sequence[tuple[Piece, int, int]], new_pieces: int
    ) -> bool:
        """Whether a key would be in too many pieces, when some replace those that are covered."""
        rests = (covered[0][1] - covered[0][0].start, covered[-1][0].stop - covered[-1][2])
        count = len(pieces) - len(covered) + sum(map(bool, rests)) + new_pieces
        return count > max(len(pieces), len(self.drives) + pieces[-1].stop // MIN_PIECE_NBYTES)

    def _take_exactly(self, start: int, shares: Sequence[tuple[int, int]]) -> list[Piece] | None:
        """Room for shares as they are; None if a drive has none to spare."""
        new: list[Piece] = []
        for drive, nbytes in shares:
            try:
                new.append(Piece(start, self._take(drive, nbytes, may_grow=self._may_grow(drive, nbytes))))
            except SwapFullError as error:
                self.free([piece.extent for piece in new])
                if error.errno is not None:  # the system refused what it has room for: not to be asked at every write
                    self.health.note_crowded(drive, error)
                return None
            start = new[-1].stop
        return new

    def _may_grow(self, drive: int, nbytes: int) -> bool:
        """Whether a file may be made longer for a move that nothing depends on."""
        file = self.drives[drive].file
        if file.extents.free_nbytes * _ROOM_FRACTION > file.extents.capacity_nbytes:
            return False
        return self._is_within_limit(nbytes) and self.health.may_grow(drive) and file.room_nbytes >= nbytes

    def _put(self, pieces: Sequence[Piece], spans: Sequence[tuple[int, int]], new: Sequence[Piece]) -> Layout:
        """The layout with `new` for the bytes of `spans`."""
        left: list[Extent] = []
        for start, stop in spans:
            kept = [piece for piece in pieces if piece.stop <= start or stop <= piece.start]
            for piece, a, b in overlap(pieces, start, stop):
                stays, extent = self._detach(piece, a, b)
                kept += stays
                left.append(extent)
            pieces = kept
        return Layout(tuple(sorted([*pieces, *new], key=lambda piece: piece.start)), left)

    def _detach(self, piece: Piece, start: int, stop: int) -> tuple[list[Piece], Extent]:
        """Cut bytes `start` to `stop` out of a piece: what stays of it, and the extent that they are in."""
        before, middle, after = start - piece.start, stop - start, piece.stop - stop
        drive, offset = piece.extent.drive, piece.extent.offset
        stays = []
        if before:
            self._split(drive, offset, before)
            stays.append(Piece(piece.start, Extent(drive, offset, before)))
        if after:
            self._split(drive, offset + before, middle)
            stays.append(Piece(stop, Extent(drive, offset + before + middle, after)))
        return stays, Extent(drive, offset + before, middle)
