"""What is closed, or given back, at the end of a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """A context manager whose block ends with `close()`, however it ends."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Releasing(ABC):
    """A context manager whose block ends with `release()`, however it ends."""

    __slots__ = ()

    @abstractmethod
    def release(self) -> None:
        """Give it back. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
