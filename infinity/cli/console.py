"""The console that commands print to, and whether what is on it can be drawn anew."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping

from rich.console import Console

from infinity.cli.ranks import this_job

_PLAIN_WIDTH = 140  # a pipe has no width; tables should not be cut at 80 columns
_DUMB = ("dumb", "unknown", "")
_NO = ("", "0", "false")


def make_console() -> Console:
    """A console on standard output; colours only on a terminal. Of several ranks the first prints.

    Text is shown as it is: what stands in brackets in a path or a name is no markup.
    """
    quiet = not this_job().is_first
    console = Console(highlight=False, markup=False, quiet=quiet)
    if isinstance(console.file, io.TextIOWrapper) and console.file.errors == "strict":
        console.file.reconfigure(errors="replace")  # a path that the terminal cannot show is no reason to end a run
    if is_terminal(console):
        return console
    return Console(highlight=False, markup=False, width=_PLAIN_WIDTH, quiet=quiet)


def is_terminal(console: Console) -> bool:
    """Whether somebody looks at it. Rich also says so of a pipe for which colours are asked for (FORCE_COLOR)."""
    try:
        return bool(console.file.isatty())
    except ValueError:  # the file is closed
        return False


def can_redraw(console: Console, environment: Mapping[str, str] | None = None) -> bool:
    """Whether a display can be drawn anew in place: on a terminal that moves its cursor, and not in a CI job's log."""
    environment = os.environ if environment is None else environment
    is_log = environment.get("CI", "").lower() not in _NO or environment.get("TERM", "").lower() in _DUMB
    return is_terminal(console) and not is_log and not console.quiet
