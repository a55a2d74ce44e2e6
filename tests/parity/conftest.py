"""Which places of a test's settings the fast run takes; `-m slow` takes the others (see `fast_places`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from tests.parity.covering import fast_places


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for _, group in itertools.groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        places = [item for item in group if hasattr(item, "callspec") and item.get_closest_marker("slow") is None]
        if places:
            settings = [place.callspec.params for place in places]  # type: ignore[attr-defined]
            chosen = fast_places(settings, somewhere=places[0].get_closest_marker("somewhere") is not None)
            for number in set(range(len(places))) - chosen:
                places[number].add_marker(pytest.mark.slow)
