"""Gathering and releasing: making a unit's parameters present on the device, and taking them away.

    RELEASED ──start──▶ UPLOADING ──finish──▶ GATHERED ──(last user gone)──▶ RELEASED

A group is gathered for a set of *users* and freed when the set is empty; that one rule covers tied weights, nested
units, repeated calls and gather on use. All transitions are idempotent. Used by the training thread (and autograd's
device thread, which counts as the same: one of them waits while the other runs).
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Hashable, Iterable, Sequence
from contextlib import ExitStack
from enum import Enum

import torch

from infinity.claims import Claims
from infinity.device_memory import DeviceMemory
from infinity.devices.base import Device, DeviceBlock, Fence
from infinity.errors import DeviceOutOfMemoryError
from infinity.flat_memory import FlatMemory
from infinity.groups import FlatGroup
from infinity.layout import FlatSpan
from infinity.lockstep import Lockstep
from infinity.observe.shortages import hand_on_report
from infinity.observe.stalls import StallClock
from infinity.order import Phase
from infinity.passage import Passage
from infinity.residency import HostCopy
from infinity.torch_compat import increment_version, preserve_version_counter
from infinity.views import KeptGroups


class GatherState(Enum):
    """Where a group's flat buffer stands."""

    RELEASED = "released"
    UPLOADING = "uploading"
    GATHERED = "gathered"


class UserHold:
    """A user that holds a group across iterations: a `gathered()` block, or the resident unit."""


class _Gathering:
    """What the gatherer knows of one group."""

    __slots__ = ("block", "fence", "group", "state", "users", "version")

    def __init__(self, group: FlatGroup) -> None:
        self.group = group
        self.state = GatherState.RELEASED
        self.users: set[Hashable] = set()
        self.block: DeviceBlock | None = None
        self.fence: Fence | None = None
        self.version = 0


class Gatherer:
    """Gathers groups on the device from their host copies.

    Args:
        device: where flat buffers live; its budget is a ceiling.
        copies: host copies by group index.
        claims: on them.
        passage: brings shards here that host memory does not hold whole.
        memory: of that device.
        flat_memory: where flat buffers lie in it.
        lockstep: where other ranks hold parts of the shards; None with one rank.

    Attributes:
        kept: groups that stay because code outside looks at their memory.
        gathers: how often a group that was not there was made present.
    """

    def __init__(
        self,
        device: Device,
        memory: DeviceMemory,
        flat_memory: FlatMemory,
        groups: Sequence[FlatGroup],
        copies: Sequence[HostCopy],
        claims: Claims,
        passage: Passage,
        stalls: StallClock,
        lockstep: Lockstep | None = None,
    ) -> None:
        self._lockstep = lockstep
        self._passage = passage
        self._device = device
        self._memory = memory
        self._flat_memory = flat_memory
        self._copies = copies
        self._stalls = stalls
        self._gatherings = [_Gathering(group) for group in groups]
        self.kept = KeptGroups(groups)
        self.claims = claims
        self.gathers = 0

    def is_gathered(self, group: FlatGroup) -> bool:
        """Whether the parameters of a group are present."""
        return self._gatherings[group.index].state is GatherState.GATHERED

    def gather(self, group: FlatGroup, user: Hashable, phase: Phase) -> bool:
        """Make the parameters of a group present for `user`. True when they were not there before.

        Raises:
            DeviceOutOfMemoryError: the device budget cannot hold the group beside what is in use.
            IoTimeoutError, ReadError: the shard could not be read.
        """
        gathering = self._gatherings[group.index]
        if gathering.state is GatherState.GATHERED:
            if isinstance(user, UserHold):
                self.part([group])
            gathering.users.add(user)
            return False
        group.refuse_replaced()
        gathering.users.add(user)
        try:
            if gathering.state is GatherState.RELEASED:
                self._start(gathering, phase)
            self._finish(gathering)
        except BaseException:
            gathering.users.discard(user)
            raise
        self.gathers += 1
        return True

    def upload_ahead(self, group: FlatGroup, phase: Phase) -> bool:
        """Start the upload of a group if its host copy is ready and the device has room. Never waits."""
        gathering = self._gatherings[group.index]
        if gathering.state is not GatherState.RELEASED:
            return True
        if self._device.budget.free_nbytes < group.flat_nbytes or (copy := self.claims.try_take(group)) is None:
            return False
        self._upload(gathering, copy, phase)
        return True

    def release(self, group: FlatGroup, user: Hashable) -> None:
        """`user` needs the group no more; its memory goes back when nobody does. Idempotent."""
        gathering = self._gatherings[group.index]
        gathering.users.discard(user)
        self._free_unused(gathering)

    def release_when_unviewed(self, group: FlatGroup, user: UserHold) -> None:
        """`user` needs the group no more, but tensors over its memory may be left: it stays until they are gone.

        Until then it is what it was inside the block: the tensors show the present values, and edits count.
        """
        gathering = self._gatherings[group.index]
        gathering.users.discard(user)
        if self.kept.views.are_alive(group):
            self._keep(gathering)
        elif not gathering.users and gathering.state is GatherState.GATHERED:
            self._free(gathering)

    def _free_unused(self, gathering: _Gathering) -> None:
        """Free a group that nobody uses, unless code outside has kept tensors over its memory."""
        if not gathering.users and gathering.state is GatherState.GATHERED:
            if self.kept.is_shown(gathering.group):
                self._keep(gathering)
            else:
                self._free(gathering)

    def _keep(self, gathering: _Gathering) -> None:
        self.part([gathering.group])
        keeper = UserHold()
        gathering.users.add(keeper)
        self.kept.keep(gathering.group, keeper)

    def release_unviewed(self) -> bool:
        """Release groups that only kept views held, if those are gone. Whether any was."""
        gone = self.kept.take_gone()
        for keeper, group in gone:
            gathering = self._gatherings[group.index]
            gathering.users.discard(keeper)
            if not gathering.users and gathering.state is GatherState.GATHERED:
                self._free(gathering)
        return bool(gone)

    def release_all(self) -> None:
        """Release every group that the iteration used; what a `UserHold` holds stays.

        What was uploaded ahead for a coming access stays too.
        """
        self.release_unviewed()
        for gathering in self._gatherings:
            gathering.users = {user for user in gathering.users if isinstance(user, UserHold)}
            self._free_unused(gathering)
            if gathering.state is GatherState.RELEASED and self._has_left(gathering):
                self._let_go(gathering)

    def _has_left(self, gathering: _Gathering) -> bool:
        """Whether a Ctrl-C came in the middle when a group was released."""
        return gathering.block is not None or self._flat_memory.has_loan(gathering.group)

    def drop_ahead(self, groups: Iterable[FlatGroup]) -> None:
        """Free what was only uploaded ahead of these groups: their values are about to change."""
        for gathering in (self._gatherings[group.index] for group in groups):
            if gathering.state is GatherState.UPLOADING and not gathering.users:
                self._free(gathering)

    def close(self) -> None:
        """Free everything, whoever holds it; only memory that tensors outside still show lives as long as they do."""
        with ExitStack() as closing:  # all of them, whatever fails
            for gathering in self._gatherings:
                gathering.users.clear()
                if gathering.state is not GatherState.RELEASED:
                    stays = self.kept.views.are_alive(gathering.group) or not gathering.group.is_resizable
                    closing.callback(self._leave if stays else self._free, gathering)

    def gathered(self) -> list[FlatGroup]:
        """Groups that have device memory now: present, or on their way."""
        return [g.group for g in self._gatherings if g.state is not GatherState.RELEASED]

    def refresh(self, group: FlatGroup) -> None:
        """Fill a gathered group again from its host copy, after an update."""
        gathering = self._gatherings[group.index]
        if gathering.state is GatherState.RELEASED or gathering.block is None:
            return
        if self._copies[group.index].is_chunked:
            self._fill_in_chunks(gathering, gathering.block)
            self._finish(gathering)
        else:
            copy = self.claims.take(group)
            try:
                fence = self._fill(gathering, gathering.block, copy)
                self._finish(gathering)
                self._stalls.wait_fence(fence, group.key)  # the update of the next step changes the host copy
            finally:
                self.claims.release(group)
        increment_version(group.flat)  # a graph of before would be differentiated with the new values
        self.accept_edits(group)

    def lend(self, group: FlatGroup, wanting: Collection[int]) -> None:
        """Give other ranks, by member number, this rank's span of a group that it does not gather now itself."""
        if self._lockstep is None:
            return
        gathering, span = self._gatherings[group.index], group.param_span
        collectives = self._lockstep.collectives
        if gathering.state is not GatherState.RELEASED and not collectives.uses_nccl:
            if gathering.fence is not None:
                self._device.make_ready(gathering.fence)
            self._lockstep.lend_now(group.flat.data[span.start : span.stop], wanting)
            return
        # What is thrown away has the size of what the transfer fills: with NCCL the whole buffer.
        place = span if collectives.uses_nccl else FlatSpan(0, span.numel)
        numel = group.layout.numel if collectives.uses_nccl else span.numel
        block = self._allocate(numel * group.compute_dtype.itemsize, f"span of {group.key} for other ranks")
        try:
            with torch.inference_mode(False), torch.no_grad():
                buffer = torch.empty(numel, dtype=group.compute_dtype, device=self._device.torch_device)
            own = buffer[place.start : place.stop]
            offset_nbytes = place.start * group.compute_dtype.itemsize
            self._fill_lent(group, block, own, offset_nbytes)
            if collectives.uses_nccl:
                self._lockstep.gather_now(buffer, group.span_of)
            else:
                self._lockstep.lend_now(own, wanting)
        finally:
            self._memory.free(block)

    def _fill_lent(self, group: FlatGroup, block: DeviceBlock, own: torch.Tensor, offset_nbytes: int) -> None:
        if self._copies[group.index].is_chunked:
            self.claims.updated(group).raise_lost_update()
            self._passage.fill(group, block, own, offset_nbytes=offset_nbytes)
            return
        copy = self.claims.take(group)
        try:
            fence = self._device.upload(block, copy.tensor, own, group.key, offset_nbytes=offset_nbytes)
            self._stalls.wait_fence(fence, group.key)
        finally:
            self.claims.release(group)

    def is_held(self, group: FlatGroup) -> bool:
        """Whether a `UserHold` holds the group: then edits are written back, not lost."""
        return _is_held(self._gatherings[group.index])

    def part(self, groups: Iterable[FlatGroup]) -> None:
        """The host copies of groups are about to change: what is gathered of them shall not."""
        for group in groups:
            if self._flat_memory.is_shared(group):
                self._flat_memory.unshare(group, is_edited=self.edited(group))

    def edited(self, group: FlatGroup) -> bool:
        """Whether somebody changed the gathered parameters in place since they were filled."""
        gathering = self._gatherings[group.index]
        if gathering.state is not GatherState.GATHERED:
            return False
        return group.flat._version != gathering.version or group.is_data_changed

    def accept_edits(self, group: FlatGroup) -> None:
        """The present values have been written back: they count as unchanged from now on."""
        self._gatherings[group.index].version = group.flat._version
        group.accept_data()

    # Parts -----------------------------------------------------------------------------------------------------

    def _start(self, gathering: _Gathering, phase: Phase) -> None:
        if self._copies[gathering.group.index].is_chunked:
            self._pass(gathering)
        else:
            self._upload(gathering, self.claims.take(gathering.group), phase)

    def _pass(self, gathering: _Gathering) -> None:
        """Bring a chunked group to the device. If that fails it is released."""
        group = gathering.group
        self._let_go(gathering)
        try:
            gathering.block = self._allocate(group.flat_nbytes, group.key)
            self._flat_memory.give(group, is_held=_is_held(gathering))
            self._fill_in_chunks(gathering, gathering.block)
        except BaseException:
            self._let_go(gathering)
            raise
        self.claims.waits["demand"] += 1
        gathering.state = GatherState.UPLOADING

    def _fill_in_chunks(self, gathering: _Gathering, block: DeviceBlock) -> None:
        group = gathering.group
        self.claims.updated(group).raise_lost_update()
        span, size = group.param_span, group.compute_dtype.itemsize
        with torch.no_grad(), preserve_version_counter(group.flat):
            own = group.flat[span.start : span.stop]
            self._passage.fill(group, block, own, offset_nbytes=span.start * size)

    def _upload(self, gathering: _Gathering, copy: HostCopy, phase: Phase) -> None:
        """Start the upload of a claimed copy. If that fails the group is released and the claim given up."""
        group = gathering.group
        try:
            self._let_go(gathering)
            gathering.block = self._allocate(group.flat_nbytes, group.key)
            fence: Fence | None = None
            if _is_held(gathering) or not self._flat_memory.share(copy):
                self._flat_memory.give(group, is_held=_is_held(gathering))
                fence = self._fill(gathering, gathering.block, copy)
            gathering.state = GatherState.UPLOADING
            self.claims.end_after(group, phase, fence)
        except BaseException:  # Ctrl-C too, wherever it comes
            try:
                self._free(gathering)
            finally:
                self.claims.end_after(group, phase)
            raise

    def _fill(self, gathering: _Gathering, block: DeviceBlock, copy: HostCopy) -> Fence:
        group = gathering.group
        # The plain copy would count as an in-place change of saved tensors, and backward would refuse them.
        with torch.no_grad(), preserve_version_counter(group.flat):
            span, size = group.param_span, group.compute_dtype.itemsize
            own = group.flat[span.start : span.stop]
            fence = self._device.upload(block, copy.tensor, own, group.key, offset_nbytes=span.start * size)
        gathering.fence = fence
        return fence

    def _finish(self, gathering: _Gathering) -> None:
        if gathering.fence is not None:
            self._device.make_ready(gathering.fence)
            gathering.fence = None
        if self._lockstep is not None and gathering.group.is_gathered_from_ranks:
            self._lockstep.gather(gathering.group)
        gathering.version = gathering.group.flat._version
        self.kept.note_gathered(gathering.group)
        gathering.state = GatherState.GATHERED
        gathering.group.show_gathered()

    def _allocate(self, nbytes: int, owner: str) -> DeviceBlock:
        try:
            return self._memory.allocate(nbytes, owner)
        except DeviceOutOfMemoryError as error:
            if not self.kept:
                raise
            explained = DeviceOutOfMemoryError(
                f"{error}. Views of parameters, kept from a forward, a backward or `infinity.gathered(...)`, are still "
                f"in use and keep the memory of {self.kept}: keep a clone instead, or delete them"
            )
            hand_on_report(error, explained)
            raise explained from error

    def free_ahead(self) -> bool:
        """Free one group that was only uploaded ahead, or that nobody looks at any more. False when there is none."""
        ahead = [g for g in self._gatherings if g.state is GatherState.UPLOADING and not g.users]
        if ahead:
            self._free(ahead[-1])
        if ahead or not self.kept:
            return bool(ahead)
        gc.collect()  # the frames of an exception hold its tensors until somebody looks for cycles
        return self.release_unviewed()

    def _free(self, gathering: _Gathering) -> None:
        if self._flat_memory.is_shared(gathering.group) and self.edited(gathering.group):
            self._flat_memory.unshare(gathering.group, is_edited=True)
        if gathering.fence is not None:
            self._stalls.wait_fence(gathering.fence, gathering.group.key)
            gathering.fence = None
        gathering.group.show_released()
        self._let_go(gathering)

    def _leave(self, gathering: _Gathering) -> None:
        """The engine forgets a group's device memory, which goes when the last tensor or array over it does."""
        gathering.group.show_released()
        self._flat_memory.leave(gathering.group)
        if gathering.block is not None:
            self._memory.free(gathering.block)
            gathering.block = None
        gathering.state = GatherState.RELEASED

    def _let_go(self, gathering: _Gathering) -> None:
        """Give back what device memory the group has. Idempotent: what a Ctrl-C here has left goes the next time."""
        try:
            self._flat_memory.take_back(gathering.group)
        finally:
            if gathering.block is not None:
                self._memory.free(gathering.block)
                gathering.block = None
            gathering.state = GatherState.RELEASED


def _is_held(gathering: _Gathering) -> bool:
    return any(isinstance(user, UserHold) for user in gathering.users)
