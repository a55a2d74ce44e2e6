"""Every async test here runs on a loop with virtual time."""

from __future__ import annotations

from typing import Any

from infinity.testing import VirtualTimeLoop


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, type[VirtualTimeLoop]]:
    return {"virtual": VirtualTimeLoop}
