"""Claims on host copies: made by the training thread before it looks at the bytes, given up on the I/O loop.

A claimed copy is not dropped; see `infinity.residency`. The claim of a copy that goes to the device ends when that has
the bytes (`end_after`), any other one when whoever made it has no use for them any more (`release`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from infinity.devices.base import Fence
from infinity.groups import FlatGroup
from infinity.host_block import HostBlock
from infinity.io_loop import IoLoop
from infinity.observe.stalls import StallCause, StallClock
from infinity.order import Phase
from infinity.readahead import ReadAhead
from infinity.residency import CopyState, HostCopy
from storage.errors import ClosedError
from storage.types import Ticket


class Claims:
    """The claims of one engine. Used by the training thread.

    Args:
        copies: host copies by group index.
        read_ahead, io: the scheduler, which moves the copies, and the loop it runs on.

    Attributes:
        waits: how often the bytes were found there, on their way, or had to be asked for.
    """

    def __init__(self, copies: Sequence[HostCopy], read_ahead: ReadAhead, io: IoLoop, stalls: StallClock) -> None:
        self._copies = copies
        self._read_ahead = read_ahead
        self._io = io
        self._stalls = stalls
        self.waits = {"ready": 0, "in_flight": 0, "demand": 0}

    def take(self, group: FlatGroup) -> HostCopy:
        """The host copy with its bytes there, claimed: waits for an update, a read ahead, or a demand read.

        Raises:
            IoTimeoutError, ReadError: the shard could not be read.
        """
        copy = self.updated(group)
        if copy.claim():
            self.waits["ready" if copy.ticket.done or copy.state is not CopyState.READING else "in_flight"] += 1
        else:
            self.waits["demand"] += 1
            ticket = self._io.submit(self._read_ahead.demand(group.index), f"demand of {group.key}")
            try:
                self._stalls.wait(ticket, StallCause.NVME_READ)
            except BaseException:
                ticket.add_done_callback(partial(self._drop, group))
                raise
        if copy.state in (CopyState.READING, CopyState.FAILED):  # it may have failed since it was claimed
            try:
                self._stalls.wait(copy.ticket, StallCause.NVME_READ)
            except BaseException:
                self.end_after(group, Phase.FORWARD)
                raise
        return copy

    def try_take(self, group: FlatGroup) -> HostCopy | None:
        """The host copy, claimed, if its bytes are there. Never waits."""
        copy = self._copies[group.index]
        if not copy.ticket.done or not copy.claim():
            return None
        if not copy.ticket.done or copy.ticket.exception is not None:
            self.release(group)  # there, because whoever waits for the end of a claim is told, and the memory goes back
            return None
        self.waits["ready"] += 1
        return copy

    def updated(self, group: FlatGroup) -> HostCopy:
        """The host copy, not claimed, after the last update of the group."""
        copy = self._copies[group.index]
        if not copy.update.done:
            self._io.post(self._read_ahead.want, group.index)
            self._stalls.wait(copy.update, StallCause.OPTIMIZER)
        return copy

    def end_after(self, group: FlatGroup, phase: Phase, fence: Fence | None = None) -> None:
        """The copy is used in a phase of the iteration: its claim ends when `fence` has passed; without one, now."""
        self._io.post(self._read_ahead.consumed, group.index, phase, fence)

    def release(self, group: FlatGroup) -> None:
        """Give up a claim that no phase of the iteration has made."""
        self.end_after(group, Phase.BACKWARD)

    def renew(self, group: FlatGroup, shared: HostBlock) -> None:
        """The host copy, which may be about to change, gets other memory than what it shares with the device."""
        ticket = self._io.submit(self._read_ahead.renew(group.index, shared), f"other memory for {group.key}")
        self._stalls.wait(ticket, StallCause.OPTIMIZER)

    def forget_edited(self, group: FlatGroup, shared: HostBlock) -> None:
        """The host copy was changed on the device, with which it shares memory: the swap file has what it was."""
        ticket = self._io.submit(self._read_ahead.forget_edited(group.index, shared), f"former values of {group.key}")
        self._stalls.wait(ticket, StallCause.NVME_READ)

    def end_all(self) -> None:
        """An iteration was given up, perhaps between a claim and what ends it: nothing is claimed any more.

        But for what the device is reading, whose claim ends with that.
        """
        ticket = self._io.submit(self._read_ahead.end_claims(), "claims of an iteration that was given up")
        self._stalls.wait(ticket, StallCause.NVME_READ)

    def _drop(self, group: FlatGroup, demand: Ticket) -> None:
        """A demand is over that nobody waits for any more (Ctrl-C, a timeout): what it has claimed is given up."""
        if demand.exception is None:
            with suppress(ClosedError):
                self.end_after(group, Phase.FORWARD)
