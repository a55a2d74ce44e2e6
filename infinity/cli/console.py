"""The console that commands print to."""

from __future__ import annotations

from rich.console import Console

_PLAIN_WIDTH = 140  # a pipe has no width; tables should not be cut at 80 columns


def make_console() -> Console:
    """A console on standard output; colours and live display only on a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)
