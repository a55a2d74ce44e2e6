"""Residency: where the shard of every group is now, as one explicit state machine per shard.

    ABSENT ──begin_read──▶ READING ──landed──▶ CLEAN ──begin_update──▶ UPDATING ──updated──▶ WRITING ──written──▶ CLEAN
       ▲                                         │                                              │
       └─────────────────── drop ────────────────┴──────────── written, not to be kept ─────────┘
    any transition in progress ──fail──▶ FAILED ──drop──▶ ABSENT

A host copy is *clean* when the swap file holds the same bytes. Shards placed in host memory for good are read from
there alone: their copy is born CLEAN and goes UPDATING → CLEAN. A swap file is behind them only where steps are
durable; the write into it is waited for by their next update.

Only the I/O loop moves a copy from state to state. The training thread *claims* a copy before it looks at the bytes;
a claimed copy is not dropped. The lock that makes a claim and a drop exclude each other is held for a flag check.
"""

from __future__ import annotations

import threading
from collections import deque
from enum import Enum

import torch

from infinity.errors import InfinityError
from infinity.groups import FlatGroup
from infinity.host_block import HostBlock
from storage.errors import detached
from storage.types import Ticket

_HISTORY = 8


class CopyState(Enum):
    """State of the host copy of one shard."""

    ABSENT = "absent"
    READING = "reading"
    CLEAN = "clean"
    UPDATING = "updating"
    WRITING = "writing"
    FAILED = "failed"


class ResidencyError(InfinityError):
    """A transition that the state machine does not allow: a bug of the engine. Carries the history of the shard."""


class HostCopy:
    """The host copy of one group's shard."""

    def __init__(self, group: FlatGroup, *, pinned: bool, is_stored: bool | None = None) -> None:
        self.group = group
        self.pinned = pinned  # placed in host memory for good
        self.is_stored = not pinned if is_stored is None else is_stored  # whether the swap files hold the shard too
        self.is_chunked = False  # passes host memory in chunks and is never here; see passage.py
        self.keep_at_turn = False
        self.keep_at_boundary = False
        self.is_updated_ahead = False  # its deferred update runs, or has run, in the window for the use that comes
        self.is_used_up = False  # used for what it was kept for while still being written behind
        self.awaits_update = False  # kept after backward because an update is expected to follow
        self.lost_update: BaseException | None = None  # why the newest bytes could not be written
        self.state = CopyState.ABSENT
        self.ticket = Ticket.completed(group.key)  # completes when the transition in progress does
        self.update = Ticket.completed(group.key)  # completes when no update of the shard is pending
        self.block: HostBlock | None = None
        self.history: deque[CopyState] = deque([CopyState.ABSENT], maxlen=_HISTORY)
        self._is_claimed = False
        self._claim_lock = threading.Lock()

    def claim(self) -> bool:
        """Keep the copy from being dropped while its bytes are used. False when it is not there to be used.

        What a run reads from the swap file must not depend on timing. So bytes still being written behind may be used
        only if the copy will be kept; and a copy can be claimed again only after the loop has heard that the last claim
        is over and has decided whether to keep it.
        """
        with self._claim_lock:
            usable = self.state in (CopyState.READING, CopyState.CLEAN) or (
                self.state is CopyState.WRITING and self.stays_when_written
            )
            if usable and self.is_settled and not self._is_claimed:
                self._is_claimed = True
                return True
            return False

    def unclaim(self) -> None:
        """End a claim. Idempotent."""
        with self._claim_lock:
            self._is_claimed = False

    @property
    def is_settled(self) -> bool:
        """Whether the newest bytes of the shard are where the state says: no update is pending, and none was lost."""
        return self.update.done and self.lost_update is None

    @property
    def stays_when_written(self) -> bool:
        """Whether a copy that is being written behind stays for the next forward, which has not used it yet."""
        return (self.keep_at_boundary or self.is_updated_ahead) and not self.is_used_up

    @property
    def is_claimed(self) -> bool:
        """Whether somebody works with the copy, which is not dropped meanwhile."""
        return self._is_claimed

    def begin_read(self, block: HostBlock, ticket: Ticket) -> None:
        """The copy gets its memory, and `ticket` completes when the bytes have landed there."""
        self._expect(CopyState.READING, CopyState.ABSENT)
        self.block, self.ticket = block, ticket
        self.is_updated_ahead = False
        self._move(CopyState.READING)

    def landed(self) -> None:
        """The read is over."""
        self._expect(CopyState.CLEAN, CopyState.READING)
        self._move(CopyState.CLEAN)

    def begin_update(self, ticket: Ticket) -> None:
        """The optimizer begins to change the bytes; `ticket` completes when it has."""
        self._expect(CopyState.UPDATING, CopyState.CLEAN)
        self.ticket = ticket
        self.awaits_update = self.is_used_up = False
        self._move(CopyState.UPDATING)

    def updated(self, written: Ticket) -> None:
        """The new bytes are final; `written` completes when the swap file holds them too."""
        following = CopyState.CLEAN if self.pinned else CopyState.WRITING
        self._expect(following, CopyState.UPDATING)
        self.ticket = written
        self._move(following)

    def written(self) -> None:
        """The swap file holds the bytes too."""
        self._expect(CopyState.CLEAN, CopyState.WRITING)
        self._move(CopyState.CLEAN)

    def drop(self) -> bool:
        """Give the memory back. Idempotent. False, and nothing happens, while the copy is claimed.

        Not while a read or an update uses the memory; a copy that is being written is dropped when the write is over.
        """
        with self._claim_lock:
            if self._is_claimed:
                return False
            if self.state is not CopyState.ABSENT:
                self._expect(CopyState.ABSENT, CopyState.CLEAN, CopyState.WRITING, CopyState.FAILED)
                self._move(CopyState.ABSENT)
        self._free()
        return True

    def fail(self) -> None:
        """The transition in progress failed. The bytes of an update stay in memory until `drop`."""
        if self.state is not CopyState.FAILED:
            self._expect(CopyState.FAILED, CopyState.READING, CopyState.UPDATING, CopyState.WRITING)
            self._move(CopyState.FAILED)

    def free_failed(self) -> None:
        """Give back the memory of a read that failed: it holds nothing. Not while claimed, nor what an update made."""
        with self._claim_lock:
            if self._is_claimed or self.state is not CopyState.FAILED or self.lost_update is not None:
                return
        self._free()

    def raise_lost_update(self) -> None:
        """Raise what kept the newest bytes of the shard from being written, if anything did."""
        if self.lost_update is not None:
            raise detached(self.lost_update)

    def discard(self) -> None:
        """Give the memory back whatever the state: the engine is closing and nothing is in flight any more."""
        self.state = CopyState.ABSENT
        self.history.append(self.state)
        self._free()

    @property
    def is_shareable(self) -> bool:
        """Whether a device that computes in host memory may work on these bytes as they are; see flat_memory.py."""
        is_clean = self.state in (CopyState.READING, CopyState.CLEAN)  # landed, but the loop has not told so yet
        return is_clean and self.group.is_stored_as_computed and not self.pinned

    @property
    def memory(self) -> memoryview:
        """The shard's bytes in host memory."""
        if self.block is None:
            raise ResidencyError(f"{self.group.key} has no host copy: {self.describe()}")
        return self.block.memory

    @property
    def tensor(self) -> torch.Tensor:
        """The shard as a 1-D tensor of its stored dtype, a view of the host memory."""
        return torch.frombuffer(self.memory, dtype=self.group.shard_dtype, count=self.group.param_span.numel)

    def describe(self) -> str:
        return f"{self.group.key}: {' → '.join(state.value for state in self.history)}"

    def _free(self) -> None:
        if self.block is not None:
            self.block.release()
            self.block = None

    def _expect(self, to: CopyState, *origins: CopyState) -> None:
        """Refuse a transition to `to` that does not start at one of `origins`, before anything has changed."""
        if self.state not in origins:
            raise ResidencyError(f"host copy of {self.describe()} cannot become {to.value}")

    def _move(self, to: CopyState) -> None:
        self.state = to
        self.history.append(to)
