"""The part of a shard store that the engine's policies need: `storage.store.ShardStore` and simulated ones have it."""

from __future__ import annotations

from typing import Protocol

from storage.types import Priority, Ticket, TrafficTag


class ShardIo(Protocol):
    """Submits transfers between page-aligned memory and the bytes of a key; see `storage.store.ShardStore`."""

    def submit_read(
        self,
        key: str,
        memory: memoryview,
        *,
        offset: int = 0,
        priority: Priority = Priority.READ_AHEAD,
        tag: TrafficTag,
        payload_nbytes: int | None = None,
    ) -> Ticket: ...

    def submit_write(
        self,
        key: str,
        memory: memoryview,
        *,
        offset: int = 0,
        priority: Priority = Priority.WRITE,
        tag: TrafficTag,
        payload_nbytes: int | None = None,
    ) -> Ticket: ...
