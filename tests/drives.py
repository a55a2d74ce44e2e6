"""Something between the stores that engines open and their drives: faults, counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from storage.backends.base import Backend
from storage.backends.faulty import FaultyBackend
from storage.store import ShardStore

Wrap = Callable[[Backend], Backend]


def wrap_drives(monkeypatch: pytest.MonkeyPatch, wrap: Wrap, store: type[Any] = ShardStore) -> None:
    """Every store opened from now on has `wrap` nearest to its drives, under what opens it puts there itself."""
    really_open = store.open

    def open_wrapped(*args: Any, wrap_backend: Wrap | None = None, **settings: Any) -> Any:
        def both(backend: Backend) -> Backend:
            wrapped = wrap(backend)
            return wrapped if wrap_backend is None else wrap_backend(wrapped)

        return really_open(*args, wrap_backend=both, **settings)

    monkeypatch.setattr(store, "open", open_wrapped)


def wrap_faulty(monkeypatch: pytest.MonkeyPatch, store: type[Any] = ShardStore) -> Callable[[], FaultyBackend]:
    """Every store opened from now on can fail; what is returned gives the backend of the one opened last."""
    made: list[FaultyBackend] = []

    def wrap(backend: Backend) -> Backend:
        made.append(FaultyBackend(backend))
        return made[-1]

    wrap_drives(monkeypatch, wrap, store)
    return lambda: made[-1]
