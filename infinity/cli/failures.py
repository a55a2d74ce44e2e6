"""How a command ends: errors as one readable block, signals as a clean stop, and the exit code that belongs to each."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from infinity.cli.logs import shown_logs

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM, taken like Ctrl-C: what was opened gets closed."""


@contextmanager
def reported(*, debug: bool) -> Iterator[None]:
    """Turn what goes wrong inside into a message and an exit code.

    Args:
        debug: show the traceback as well, and log messages from INFO on.
    """
    try:
        with shown_logs(debug=debug), _terminated_like_interrupted():
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


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM have no effect inside: for closing, which is bounded, and has to come to its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferred() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect at the end: for imports, which an exception in their middle leaves half done.

    Some of torch's modules even swallow it, and the run would go on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if not arrived:
            print("stopping as soon as everything is loaded", file=sys.stderr)
        arrived.append(number)

    # What is ignored stays so: a shell that starts a job in the background lets it ignore Ctrl-C.
    heeded = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if arrived:
        raise Terminated if arrived[0] == signal.SIGTERM else KeyboardInterrupt


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _code_of(error: Exception) -> int:
    from infinity.errors import ConfigError, PlacementError

    return EXIT_USAGE if isinstance(error, ConfigError | PlacementError) else EXIT_FAILURE


def _block(error: Exception, debug: bool) -> str:
    """The error and what caused it, a line or a paragraph each."""
    lines = [f"error: {_name(error)}{error}", *_notes(error)]
    cause = error.__cause__
    while cause is not None:
        lines += [f"  caused by {type(cause).__name__}: {cause}", *_notes(cause)]
        cause = cause.__cause__
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
