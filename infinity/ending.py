"""Joining threads at the end, for a bounded time: what hangs in a system call must not keep `close()` waiting."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Executor

_log = logging.getLogger(__name__)
_JOIN_TIMEOUT_S = 10.0


def end_executor(executor: Executor, what: str, timeout_s: float = _JOIN_TIMEOUT_S) -> None:
    """Let an executor finish what it was given and join its threads; what takes longer is left behind, and logged.

    Args:
        what: whose work it is, for the log.
    """
    ending = threading.Thread(target=executor.shutdown, name="infinity-ending", daemon=True)
    ending.start()
    ending.join(timeout_s)
    if ending.is_alive():
        _log.error("%s has not ended within %g s and is left behind", what, timeout_s)
