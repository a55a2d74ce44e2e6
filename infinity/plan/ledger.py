"""What all runs together have written to each drive, day by day, in one small database of the user.

A drive is known by its serial number or file system, so the ledger outlives folders and boots. SMART, where it can be
read, tells what everybody has written to the drive (see `infinity.plan.drive_counters`).
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from infinity.errors import InfinityError

_BUSY_TIMEOUT_S = 10.0
_TABLE = """
CREATE TABLE IF NOT EXISTS written (
    device TEXT NOT NULL, day TEXT NOT NULL, nbytes INTEGER NOT NULL, PRIMARY KEY (device, day)
)
"""


class LedgerError(InfinityError):
    """The ledger cannot be read or written; says where it is and what to do."""


def state_folder() -> Path:
    """The user's folder for state that should persist (XDG base directory specification).

    A user without a home, as containers have them, has a folder among the temporary files.
    """
    if given := os.environ.get("XDG_STATE_HOME"):
        return Path(given) / "infinity"
    try:
        return Path.home() / ".local" / "state" / "infinity"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"infinity-state-{os.getuid()}"


def default_ledger_path() -> Path:
    """Where the ledger of this user is."""
    return state_folder() / "wear.sqlite3"


def today() -> str:
    """The day in UTC, as the ledger has it."""
    return datetime.now(UTC).date().isoformat()


class WearLedger:
    """Bytes written, by device and day. Opens the database for each call, so any number of processes may use it."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = default_ledger_path() if path is None else path

    def add(self, device: str, nbytes: int, day: str | None = None) -> None:
        """Count bytes written to a device.

        Raises:
            LedgerError: the database cannot be written.
        """
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes: what has been written cannot be taken back")
        if nbytes:
            with self._open() as connection, connection:
                connection.execute(
                    "INSERT INTO written VALUES (?, ?, ?) "
                    "ON CONFLICT (device, day) DO UPDATE SET nbytes = nbytes + excluded.nbytes",
                    (device, day or today(), nbytes),
                )

    def written_nbytes(self, device: str, day: str | None = None) -> int:
        """Bytes written to a device, on one day or in all.

        Raises:
            LedgerError: the database cannot be read.
        """
        query, values = "SELECT COALESCE(SUM(nbytes), 0) FROM written WHERE device = ?", [device]
        if day is not None:
            query, values = f"{query} AND day = ?", [device, day]
        with self._open() as connection:
            return int(connection.execute(query, values).fetchone()[0])

    def devices(self) -> list[str]:
        """Every device that something was written to."""
        with self._open() as connection:
            return [row[0] for row in connection.execute("SELECT DISTINCT device FROM written ORDER BY device")]

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=_BUSY_TIMEOUT_S)) as connection:
                connection.execute(_TABLE)
                yield connection
        except (sqlite3.Error, OSError) as error:
            raise LedgerError(
                f"the wear ledger {self.path} cannot be used: {error}. Free space or fix its permissions; a damaged "
                "file can be moved away, what it counted is lost then"
            ) from error
