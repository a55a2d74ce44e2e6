"""The part of a shard store that the engine's policies need: `storage.store.ShardStore` and simulated ones have it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol, Required, TypedDict, Unpack

from storage.checksums import Digests
from storage.ordering import KeyOrder, Operation
from storage.types import Op, Priority, Ticket, TrafficTag


class Transfer(TypedDict, total=False):
    """What is said of a transfer; see `storage.store.ShardStore.submit_read`."""

    offset: int
    priority: Priority
    tag: Required[TrafficTag]
    payload_nbytes: int | None


class Write(Transfer, total=False):
    """And of a write; see `storage.store.ShardStore.submit_write`."""

    digests: Digests | None


class SubmitRead(Protocol):
    """Submits a read of bytes of a key into page-aligned memory."""

    def __call__(self, key: str, memory: memoryview, **said: Unpack[Transfer]) -> Ticket: ...


class SubmitWrite(Protocol):
    """Submits a write of page-aligned memory to bytes of a key."""

    def __call__(self, key: str, memory: memoryview, **said: Unpack[Write]) -> Ticket: ...


class ShardIo(Protocol):
    """What the engine's policies ask of a store."""

    @property
    def submit_read(self) -> SubmitRead: ...

    @property
    def submit_write(self) -> SubmitWrite: ...

    @property
    def n_drives(self) -> int: ...

    def nbytes_by_drive(self, key: str, start: int, stop: int) -> Mapping[int, int]: ...

    def promote(self, key: str) -> None: ...


class SimulatedIo(ABC):
    """Implements `ShardIo` on the running loop's time; what a transfer does and how long it takes, subclasses say.

    The ordering per key is the real store's: overlapping operations of which one is a write run in submission order.
    Used on the thread of the loop only.
    """

    def __init__(self) -> None:
        self._orders: dict[str, KeyOrder] = {}
        self._submitted_s: dict[Operation, float] = {}

    @property
    def n_drives(self) -> int:
        """As `storage.store.ShardStore.n_drives`."""
        return 1

    def nbytes_by_drive(self, key: str, start: int, stop: int) -> Mapping[int, int]:
        """As `storage.store.ShardStore.nbytes_by_drive`."""
        return {0: stop - start}

    @property
    def in_flight(self) -> int:
        """Transfers submitted and not finished."""
        return len(self._submitted_s)

    def describe_in_flight(self) -> list[str]:
        """Transfers submitted and not finished, as "read of KEY", in order of submission."""
        return [operation.ticket.label for operation in self._submitted_s]

    @property
    def submit_read(self) -> SubmitRead:
        """As `storage.store.ShardStore.submit_read`."""
        return partial(self._submit, Op.READ, priority=Priority.READ_AHEAD)

    @property
    def submit_write(self) -> SubmitWrite:
        """As `storage.store.ShardStore.submit_write`."""
        return partial(self._submit, Op.WRITE, priority=Priority.WRITE)

    def promote(self, key: str) -> None:
        """As `storage.store.ShardStore.promote`."""
        promoted = [operation for operation in self._submitted_s if operation.key == key]
        for operation in promoted:
            operation.priority = Priority.DEMAND
        self._promoted(promoted)

    @abstractmethod
    def _promoted(self, operations: Sequence[Operation]) -> None:
        """The priority of operations in flight has risen."""

    def _submit(
        self,
        op: Op,
        key: str,
        memory: memoryview,
        *,
        offset: int = 0,
        priority: Priority,
        tag: TrafficTag,
        payload_nbytes: int | None = None,
        digests: Digests | None = None,
    ) -> Ticket:
        self._check_span(op, key, offset, offset + len(memory))
        payload_nbytes = len(memory) if payload_nbytes is None else payload_nbytes
        ticket = Ticket(f"{op.value} of {key}")
        operation = Operation(op, key, offset, memory, priority, tag, payload_nbytes, ticket)
        self._submitted_s[operation] = asyncio.get_running_loop().time()
        if self._orders.setdefault(key, KeyOrder()).add(operation):
            self._begin(operation)
        return ticket

    @abstractmethod
    def _check_span(self, op: Op, key: str, start: int, stop: int) -> None:
        """Refuse bytes that a key does not have, where that is known. Raises ValueError."""

    def _finish(self, operation: Operation, error: BaseException | None = None) -> None:
        """An operation is over: what waited for it begins, then its ticket is done."""
        del self._submitted_s[operation]
        for free in self._orders[operation.key].remove(operation, error):
            self._begin(free)
        operation.ticket.complete(error)

    @abstractmethod
    def _begin(self, operation: Operation) -> None:
        """Nothing stands in the way of an operation any more. Ends in `_finish`."""
