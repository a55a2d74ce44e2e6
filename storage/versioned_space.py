"""The space of a versioned store: what a generation refers to is neither overwritten nor given back."""

from __future__ import annotations

from collections.abc import Sequence

from storage.drives import Drive, StorageOptions
from storage.extents import ExtentAllocator
from storage.health import DriveHealth
from storage.meters import DriveMeters
from storage.space import Space
from storage.stripes import Piece
from storage.types import Extent


class VersionedSpace(Space):
    """A Space in which what a generation refers to is neither overwritten nor given back before the next one.

    Attributes:
        retired: extents that only the last generation refers to.
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
        super().__init__(drives, speeds, options=options, meters=meters, health=health)
        self._fresh: set[tuple[int, int]] = set()  # extents (drive, offset) that no generation refers to
        self.retired: list[Extent] = []

    def is_fresh(self, piece: Piece) -> bool:
        """Whether no generation refers to a piece."""
        return (piece.extent.drive, piece.extent.offset) in self._fresh

    def seal(self, volatile: Sequence[Piece]) -> list[Extent]:
        """A commit begins: from now on every extent in use but those of `volatile` may be referred to by a generation.

        Returns:
            The extents that its success gives back.
        """
        self._fresh &= {(piece.extent.drive, piece.extent.offset) for piece in volatile}
        retired, self.retired = self.retired, []
        return retired

    def free_retired(self, extents: Sequence[Extent]) -> None:
        """The generation that they belonged to is over."""
        super().free(extents)

    def go_back(self, committed: Sequence[Piece], volatile: Sequence[Piece]) -> None:
        """In use is what a generation refers to, what is volatile and what is held; nothing else."""
        in_use = [piece.extent for piece in (*committed, *volatile)]
        in_use += self.holds.begin_again(in_use)
        for number, drive in enumerate(self.drives):
            used = [(extent.offset, extent.nbytes) for extent in in_use if extent.drive == number]
            drive.file.extents = ExtentAllocator.restore(drive.file.extents.capacity_nbytes, used)
            self.held_nbytes[number] = sum(nbytes for _, nbytes in used)
        self._fresh = {(piece.extent.drive, piece.extent.offset) for piece in volatile}
        self.retired = []

    def free(self, extents: Sequence[Extent]) -> None:
        fresh = [extent for extent in extents if (extent.drive, extent.offset) in self._fresh]
        self.retired += [extent for extent in extents if extent not in fresh]
        super().free(fresh)
        self._fresh -= {(extent.drive, extent.offset) for extent in fresh}

    def _may_stay(self, piece: Piece) -> bool:
        return self.is_fresh(piece) and super()._may_stay(piece)

    def _take(self, drive: int, nbytes: int, *, may_grow: bool = True) -> Extent:
        extent = super()._take(drive, nbytes, may_grow=may_grow)
        self._fresh.add((drive, extent.offset))
        return extent

    def _split(self, drive: int, offset: int, nbytes: int) -> None:
        super()._split(drive, offset, nbytes)
        if (drive, offset) in self._fresh:
            self._fresh.add((drive, offset + nbytes))
