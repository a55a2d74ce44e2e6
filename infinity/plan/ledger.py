"""What all runs together have written to each drive, day by day, in one small database of the user.

A drive is known by its serial number or file system, so the ledger outlives folders and boots. SMART, where it can be
read, tells what everybody has written to the drive, other programs and the drive's own housekeeping included.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from infinity.errors import InfinityError

_log = logging.getLogger(__name__)
_BUSY_TIMEOUT_S = 10.0
_SMART_TIMEOUT_S = 10.0
_DATA_UNIT_NBYTES = 512_000  # NVMe base specification, SMART / health log: thousands of 512-byte units
_TABLE = """
CREATE TABLE IF NOT EXISTS written (
    device TEXT NOT NULL, day TEXT NOT NULL, nbytes INTEGER NOT NULL, PRIMARY KEY (device, day)
)
"""


class LedgerError(InfinityError):
    """The ledger cannot be read or written; says where it is and what to do."""


def default_ledger_path() -> Path:
    """In the user's folder for state that should persist (XDG base directory specification)."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "infinity" / "wear.sqlite3"


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


def smart_written_nbytes(device: Path) -> int | None:
    """Bytes that the host has written to an NVMe drive in its life, by SMART; None where that cannot be read.

    Args:
        device: such as `/dev/nvme0n1`. Reading it mostly needs root, and smartctl.
    """
    command = shutil.which("smartctl")
    if command is None:
        return None
    try:
        done = subprocess.run(
            [command, "--json", "--all", str(device)],
            capture_output=True,
            text=True,
            timeout=_SMART_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.info("SMART of %s cannot be read: %s", device, error)
        return None
    return parse_smart(done.stdout)


def parse_smart(text: str) -> int | None:
    """Bytes written, from the JSON that smartctl prints; None when it does not tell."""
    try:
        report = json.loads(text)
        return int(report["nvme_smart_health_information_log"]["data_units_written"]) * _DATA_UNIT_NBYTES
    except (ValueError, KeyError, TypeError):
        return None
