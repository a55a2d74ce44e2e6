"""What the tests of stores over several drives share: drives that fail when told, and are as fast as told."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from storage.backends.base import Backend
from storage.backends.faulty import FaultyBackend
from storage.drives import StorageOptions, open_drive
from storage.health import DriveHealth
from storage.meters import DriveMeters
from storage.pool import HostPool
from storage.reserve import reserve
from storage.space import Space
from storage.store import ShardStore
from storage.types import Op
from tests.storage.helpers import MIB, PAGE, TAG, StepClock, filled, finish

_OPTIONS = {"block_nbytes": 256 << 10, "threads": 2, "free_margin_nbytes": 0, "engine": "buffered"}


def show_speeds(meters: DriveMeters, clock: StepClock, mib_per_s: Sequence[int]) -> None:
    """As if the drives had moved bytes at these speeds, so often that nothing else counts. `clock` is the meters'."""
    for _ in range(30):
        for drive, speed in enumerate(mib_per_s):
            meters.began(drive, Op.WRITE, speed * MIB)
        clock.sleep(1.0)
        for drive, speed in enumerate(mib_per_s):
            meters.ended(drive, Op.WRITE, speed * MIB, has_moved=True)


def by_drive(store: ShardStore, key: str) -> dict[int, int]:
    """Bytes of a key by drive."""
    found: dict[int, int] = {}
    for piece in store._keys[key].pieces:
        found[piece.extent.drive] = found.get(piece.extent.drive, 0) + piece.extent.nbytes
    return found


class SeveralDrives:
    """A store over drives that are wrapped by `faults`; time passes only when told, so speeds are what is told."""

    def __init__(
        self, folder: Path, drives: int = 2, capacity_nbytes: int = 0, *, wrap: Any = FaultyBackend, **options: Any
    ) -> None:
        self.clock = StepClock()
        self.faults: list[Any] = []
        self.meters = DriveMeters(drives, self.clock.now_s)

        def remember(backend: Backend) -> Any:
            self.faults.append(wrap(backend))
            return self.faults[-1]

        chosen = StorageOptions(**_OPTIONS | options)
        with ExitStack() as closing:
            opened = [
                open_drive(
                    folder / f"drive{number}",
                    0,
                    run_name="test",
                    rank=0,
                    options=chosen,
                    wrap_backend=remember,
                    closing=closing,
                )
                for number in range(drives)
            ]
            reserve(opened, capacity_nbytes, [1.0] * drives)
            directories = [drive.directory for drive in opened]
            health = DriveHealth(directories, self.clock.now_s, retry_full_s=chosen.retry_full_s)
            space = Space(opened, [1.0] * drives, options=chosen, meters=self.meters, health=health)
            self.store = ShardStore(space, closing.pop_all())

    def __enter__(self) -> SeveralDrives:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.store.close()

    def are_measured(self, *mib_per_s: int) -> None:
        """The drives have shown these speeds so often that nothing else counts."""
        show_speeds(self.meters, self.clock, mib_per_s)

    def write(self, pool: HostPool, key: str, seed: int, pages: int, first: int = 0) -> bytes:
        with filled(pool, pages * PAGE, seed) as lease:
            finish(self.store.submit_write(key, lease.memory, offset=first * PAGE, tag=TAG))
            return bytes(lease.memory)

    def read(self, pool: HostPool, key: str) -> bytes:
        with pool.lease(self.store.nbytes_of(key), key) as lease:
            finish(self.store.submit_read(key, lease.memory, tag=TAG))
            return bytes(lease.memory)

    def by_drive(self, key: str) -> dict[int, int]:
        """Bytes of a key by drive."""
        return by_drive(self.store, key)

    def extents(self, key: str) -> set[tuple[int, int, int]]:
        return {
            (piece.extent.drive, piece.extent.offset, piece.extent.nbytes) for piece in self.store._keys[key].pieces
        }

    def check_extents(self) -> None:
        """With nothing in flight: what is allocated is what the keys use, each byte of it once, and is counted."""
        used = sorted(
            (number, *span) for number, drive in enumerate(self.store._drives) for span in drive.file.extents.used()
        )
        held = [piece.extent for entry in self.store._keys.values() for piece in entry.pieces]
        assert sorted((one.drive, one.offset, one.nbytes) for one in held) == used
        for one, other in pairwise(used):
            assert one[0] != other[0] or one[1] + one[2] <= other[1]
        for entry in self.store._keys.values():
            assert [piece.start for piece in entry.pieces] == [0, *(piece.stop for piece in entry.pieces)][:-1]
            assert entry.pieces[-1].stop == entry.nbytes
        for number, report in enumerate(self.store.drive_report()):
            assert report.held_nbytes == sum(nbytes for drive, _, nbytes in used if drive == number)
