"""Ctrl-C at one chosen moment of the calling thread: the same one every time."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

_ROOT = Path(__file__).parent.parent
_PACKAGES = tuple(f"{_ROOT / name}/" for name in ("infinity", "storage"))


class CtrlC:
    """Raises KeyboardInterrupt in this block at the call with this number, counted where Python looks for signals.

    It does so when a function begins, and when one that is written in C returns. Functions of this project count.

    Args:
        at: a number from 0 on; None never.

    Attributes:
        calls: how many there were.
        has_come: whether there was one with that number.
    """

    def __init__(self, at: int | None) -> None:
        self._at = at
        self.calls = 0
        self.has_come = False

    def __enter__(self) -> Self:
        sys.setprofile(self._see)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        sys.setprofile(None)
        return self.has_come and kind is KeyboardInterrupt

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(_PACKAGES):
            return
        self.calls += 1
        if self.calls - 1 == self._at:
            self.has_come = True
            sys.setprofile(None)
            raise KeyboardInterrupt
