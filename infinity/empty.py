"""Building a model without memory; what becomes of it is in init.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from infinity.recording.recorder import recording


@contextmanager
def empty_init() -> Iterator[None]:
    """Build modules without memory: their parameters are on the `meta` device until `infinity.offload` fills them.

    What the constructors do to tensors is recorded and done then, with the random numbers that ordinary construction
    would have drawn here: the values are the same, and so is the generator's state afterwards, unless it has been used
    since. Do everything that changes values inside the block.

    Raises:
        UnsupportedModelError: a constructor needs values of such a tensor at once; see its text for what to do.

    Example:
        ```python
        with infinity.empty_init():
            model = MyModel()
        ```
    """
    with recording():
        yield
