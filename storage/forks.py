"""Forked children run what their parent registered for its end, and must not give away what is the parent's."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_this_process(function: Callable[[], None]) -> Callable[[], None]:
    """The same function, for `atexit` and finalizers: it does nothing in a forked child."""
    owner = os.getpid()

    def run() -> None:
        if os.getpid() == owner:
            function()

    return run
