"""What backends share that stand in front of another one."""

from __future__ import annotations

from storage.backends.base import Backend
from storage.backends.cost import IoCost
from storage.types import IoRequest


class BackendWrapper:
    """Passes everything on to `inner`, and closes it. Subclasses change what they are for."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def progress(self) -> int:
        return self._inner.progress

    @property
    def opens_direct(self) -> bool:
        return self._inner.opens_direct

    @property
    def cost(self) -> IoCost:
        return self._inner.cost

    def submit(self, request: IoRequest) -> None:
        self._inner.submit(request)

    def promote(self, key: str) -> None:
        self._inner.promote(key)

    def in_flight(self) -> list[IoRequest]:
        return self._inner.in_flight()

    def close(self) -> None:
        self._inner.close()
