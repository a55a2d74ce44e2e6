"""A terminal for tests: a real pseudo-terminal for the process, and a screen that does what the process writes."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping
from pathlib import Path

import infinity

ROOT = Path(infinity.__file__).parent.parent
_PATIENCE_S = 200.0
# The process becomes the leader of a session whose terminal is this one, so that Ctrl-C and new sizes reach it.
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
_PIECE = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|\r\n|[\r\n]|\x1b\][^\x07]*\x07|[^\x1b\r\n]+|\x1b")


class Screen:
    """Lines of text with a cursor: what stays in view when everything written has been done. Without line wrap."""

    def __init__(self) -> None:
        self.lines = [""]
        self.has_cursor = True
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        for found in _PIECE.finditer(text):
            piece, argument, command = found[0], found[1], found[2]
            if command:
                self._control(argument, command)
            elif piece == "\r":
                self._column = 0
            elif piece in ("\n", "\r\n"):
                self._down(resets="\r" in piece)
            elif not piece.startswith("\x1b"):
                self._write(piece)

    def _write(self, text: str) -> None:
        line = self.lines[self._row].ljust(self._column)
        self.lines[self._row] = line[: self._column] + text + line[self._column + len(text) :]
        self._column += len(text)

    def _down(self, *, resets: bool) -> None:
        self._row += 1
        if resets:
            self._column = 0
        if self._row == len(self.lines):
            self.lines.append("")

    def _control(self, argument: str, command: str) -> None:
        count = int(argument) if argument.isdecimal() else 1
        if command == "A":
            self._row = max(self._row - count, 0)
        elif command == "K":
            self.lines[self._row] = "" if argument == "2" else self.lines[self._row][: self._column]
        elif command in "hl" and argument == "?25":
            self.has_cursor = command == "h"


class Terminal:
    """A process on a pseudo-terminal of its own. Use as a context manager; the process is gone at the end."""

    def __init__(
        self, *arguments: str | Path, columns: int = 80, rows: int = 40, environment: Mapping[str, str] | None = None
    ) -> None:
        self.screen, self.output = Screen(), ""
        self._master, slave = os.openpty()
        self.resize(columns, rows)
        own = {k: v for k, v in os.environ.items() if k not in ("CI", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")}
        own |= {"TERM": "xterm-256color", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, "-c", _TAKE_TERMINAL, *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=own | dict(environment or {}),
        )
        os.close(slave)

    def resize(self, columns: int, rows: int = 40) -> None:
        """As if somebody pulled at the window's corner: the kernel sends SIGWINCH."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def read_until(self, is_there: Callable[[], bool]) -> None:
        """Take what the process writes until something is so; fails when the process ends or nothing comes."""
        while not is_there():
            assert self._read(), f"the process ended:\n{self.output}"

    def read_to_end(self) -> int:
        """Take everything; the exit code."""
        while self._read():
            pass
        return self.process.wait(_PATIENCE_S)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], _PATIENCE_S)
        assert ready, f"nothing came for {_PATIENCE_S} s:\n{self.output}"
        try:
            text = os.read(self._master, 65536).decode("utf-8", errors="replace")
        except OSError:  # EIO: the other side is closed
            return False
        self.output += text
        self.screen.feed(text)
        return bool(text)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(_PATIENCE_S)
        os.close(self._master)
