"""The console that commands print to."""

from __future__ import annotations

from rich.console import Console

from infinity.cli.ranks import this_job

_PLAIN_WIDTH = 140  # a pipe has no width; tables should not be cut at 80 columns


def make_console() -> Console:
    """A console on standard output; colours and live display only on a terminal. Of several ranks the first prints."""
    quiet = not this_job().is_first
    console = Console(highlight=False, quiet=quiet)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH, quiet=quiet)
