"""How a command ends: errors as one readable block, and the exit code that belongs to each. Signals: see `stopping`."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from infinity.cli.logs import shown_logs
from infinity.cli.stopping import Terminated, stoppable

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM


@contextmanager
def reported(*, debug: bool) -> Iterator[None]:
    """Turn what goes wrong inside into a message and an exit code.

    Args:
        debug: show the traceback as well, and log messages from INFO on.
    """
    try:
        with shown_logs(debug=debug), stoppable():
            yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt as stop:
        _show_traceback(stop, debug)
        print("stopped: swap files, threads and memory have been given back", file=sys.stderr)
        raise typer.Exit(EXIT_TERMINATED if isinstance(stop, Terminated) else EXIT_INTERRUPTED) from None
    except Exception as error:
        _show_traceback(error, debug)
        print(_block(error, debug), file=sys.stderr)
        raise typer.Exit(_code_of(error)) from None


def _code_of(error: Exception) -> int:
    from infinity.errors import CheckpointNotFoundError, ConfigError, PlacementError

    return EXIT_USAGE if isinstance(error, CheckpointNotFoundError | ConfigError | PlacementError) else EXIT_FAILURE


def _block(error: Exception, debug: bool) -> str:
    """The error and what caused it, a line or a paragraph each."""
    from storage.errors import causes_of

    lines = [f"error: {_name(error)}{error}", *_notes(error)]
    for cause in causes_of(error)[1:]:
        lines += [f"  caused by {type(cause).__name__}: {cause}", *_notes(cause)]
    if not debug and _is_unexpected(error):
        lines.append("this is not an error infinity knows; --debug shows where it happened")
    return "\n".join(lines)


def _notes(error: BaseException) -> list[str]:
    """What was added to an error, such as the report of where everything was."""
    return list(getattr(error, "__notes__", []))


def _name(error: Exception) -> str:
    from infinity.errors import ConfigError

    return "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "


def _is_unexpected(error: Exception) -> bool:
    from infinity.errors import InfinityError
    from storage.errors import StorageError

    return not isinstance(error, InfinityError | StorageError | OSError | MemoryError)


def _show_traceback(error: BaseException, debug: bool) -> None:
    if debug:
        traceback.print_exception(error, file=sys.stderr)
