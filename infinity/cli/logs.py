"""Log messages of the two packages on standard error: warnings always, everything from INFO on with `--debug`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PACKAGES = ("infinity", "storage")


class _ToStandardError(logging.Handler):
    """Looks standard error up for every message: a live display replaces it while it is on the screen."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr)
        except Exception:  # as every handler: a message that cannot be shown ends no run
            self.handleError(record)


@contextmanager
def shown_logs(*, debug: bool) -> Iterator[None]:
    """Show log messages inside."""
    handler = _ToStandardError()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s" if debug else "note: %(message)s"))
    before = {name: logging.getLogger(name).level for name in _PACKAGES}
    for name in _PACKAGES:
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO if debug else logging.WARNING)
    try:
        yield
    finally:
        for name, level in before.items():
            logger = logging.getLogger(name)
            logger.removeHandler(handler)
            logger.setLevel(level)
