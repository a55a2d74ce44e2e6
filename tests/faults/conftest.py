"""A drive that can fail, under the engines of these tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from storage.backends.base import Backend
from storage.backends.faulty import FaultyBackend
from tests.drives import wrap_drives


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], FaultyBackend]]:
    """The backend of the engine made last, ready to fail."""
    made: list[FaultyBackend] = []

    def wrap(backend: Backend) -> Backend:
        made.append(FaultyBackend(backend))
        return made[-1]

    wrap_drives(monkeypatch, wrap)
    yield lambda: made[-1]
