"""How often a command looks for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OBJECTS = 200_000  # made since the last time; by default Python looks after some hundred


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Look for garbage seldom inside: for what makes very many objects, of which few refer to each other in circles.

    Each look at all objects goes over those of torch as well, which are hundreds of thousands and stay.
    """
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
