"""A record of every transfer, in fio's own trace format: stock fio replays a training run on another disk.

    fio --name=replay --read_iolog=run.iolog --direct=1 --ioengine=libaio --iodepth=32 --size=SIZE

run in a folder of the disk to be measured; `--replay_no_stall=1` leaves the pauses of the run out. The files of the
trace are named after the drives of the run and lie in the folder where fio runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from storage.backends.base import Backend
from storage.backends.wrapper import BackendWrapper
from storage.types import IoRequest

_log = logging.getLogger(__name__)

_HEADER = "fio version 3 iolog"


class IoLog:
    """One trace of all drives of a store. Thread safe; `close` it after the backends.

    When the file cannot be written any more, the trace ends there, with a warning; the transfers go on.

    Args:
        path: the file to write; it is written while the run goes on.
        now_s: the time, in seconds from any moment.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.path = path
        self._file: TextIO | None = path.open("w", encoding="utf-8")
        self._now_s = now_s
        self._start_s = now_s()
        self._names: dict[str, str] = {}
        self._lock = threading.Lock()
        self._file.write(f"{_HEADER}\n")

    def wrap(self, backend: Backend) -> Backend:
        """For the `wrap_backend` of a store."""
        return RecordingBackend(backend, self)

    def add(self, request: IoRequest) -> None:
        """Note a transfer that is submitted now."""
        with self._lock:
            if self._file is None:
                return
            lines = []
            now_us = self._now_us()
            name = self._names.get(request.path)
            if name is None:
                name = self._names[request.path] = f"drive{len(self._names)}.dat"
                lines += [f"{now_us} {name} add", f"{now_us} {name} open"]
            self._write([*lines, f"{now_us} {name} {request.op.value} {request.offset} {len(request.memory)}"])

    def close(self) -> None:
        """End the trace. Idempotent; transfers that come later are not noted."""
        with self._lock:
            now_us = self._now_us()
            self._write([f"{now_us} {name} close" for name in self._names.values()])
            self._end()

    # With the lock held --------------------------------------------------------------------------------------------

    def _now_us(self) -> int:
        return round((self._now_s() - self._start_s) * 1e6)

    def _write(self, lines: Sequence[str]) -> None:
        try:
            if self._file is not None:
                self._file.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            self._give_up(error)

    def _end(self) -> None:
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        _log.warning("the trace %s is not complete: %s. The transfers go on", self.path, error.strerror or error)
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what it holds back cannot be written either
                file.close()


class RecordingBackend(BackendWrapper):
    """Passes everything on to `inner`, and notes what is submitted. Closes `inner`."""

    def __init__(self, inner: Backend, log: IoLog) -> None:
        super().__init__(inner)
        self._log = log

    def submit(self, request: IoRequest) -> None:
        self._log.add(request)
        self._inner.submit(request)
