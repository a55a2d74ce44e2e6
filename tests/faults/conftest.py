"""A drive that can fail, under the engines of these tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from storage.backends.faulty import FaultyBackend
from tests.drives import wrap_faulty


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Callable[[], FaultyBackend]:
    """The backend of the engine made last, ready to fail."""
    return wrap_faulty(monkeypatch)
