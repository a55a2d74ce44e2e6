"""Where the flat buffers of gathered groups lie.

On an accelerator they are allocated and freed by torch. A CPU computes where the shards are: there a unit's flat buffer
borrows memory of the host pool. If the shard has the dtype of the flat buffer, whole and clean in host memory, the flat
buffer *shares* the memory of the host copy, and nothing is copied; else it gets a block that an earlier gather has left
behind, whose pages are there already. Budgets count both as they count a copy: the host copy against the window until
it is dropped, the flat buffer against the device.

[Note: sharing]
What shares memory sees it change. So a host copy that is about to change, by its update, while its group is still
gathered, gets memory of its own first (`HostBlock.renew`); a unit's run gives its groups back before their update is
submitted, so that this is rare. The other way round, parameters that somebody has changed in place on the device must
not become the shard unseen: a host copy that shared memory with an edited group is dropped, and read again from the
swap file, which has the values of before. What only host memory holds is not shared, nor what is still being written.
"""

from __future__ import annotations

from infinity.claims import Claims
from infinity.devices.base import Device
from infinity.groups import FlatGroup
from infinity.host_block import HostBlock
from infinity.residency import HostCopy
from storage.pool import HostPool, Loan


class FlatMemory:
    """Gives flat buffers their memory and takes it away. Used by the training thread.

    Args:
        device: where they are; their bytes have been reserved there.
        pool: what is borrowed from, where the device computes in host memory.
        claims: on the host copies.
    """

    def __init__(self, device: Device, pool: HostPool, claims: Claims) -> None:
        self._device = device
        self._claims = claims
        self._pool = pool if device.computes_in_host_memory else None
        self._loans: dict[int, Loan] = {}  # by group
        self._shared: dict[int, HostBlock] = {}  # by group, the memory of the host copy at the gather

    def share(self, copy: HostCopy) -> bool:
        """Let a flat buffer show the memory of its claimed host copy. False where it has to be copied."""
        group, block = copy.group, copy.block
        if self._pool is None or block is None or not copy.is_shareable:
            return False
        self._device.note_shared(copy.tensor, group.key)
        self._shared[group.index] = block
        self._borrow(group, block.lend())
        return True

    def give(self, group: FlatGroup, *, is_held: bool) -> None:
        """Memory with undefined content. What a user holds is memory of torch, which numpy arrays may nail down."""
        if self._pool is None or is_held or not group.flat_nbytes:
            group.allocate_flat()
        else:
            self._borrow(group, self._pool.lend(group.flat_nbytes, f"flat buffer of {group.key}"))

    def has_loan(self, group: FlatGroup) -> bool:
        """Whether the flat buffer has borrowed memory."""
        return group.index in self._loans

    def is_shared(self, group: FlatGroup) -> bool:
        """Whether a gathered group shares memory with its host copy, or did when it was gathered."""
        return group.index in self._shared

    def unshare(self, group: FlatGroup, *, is_edited: bool) -> None:
        """The host copy is about to change, or the group has been: they share memory no more. Idempotent."""
        shared = self._shared.get(group.index)
        if shared is not None and is_edited:
            self._claims.forget_edited(group, shared)
        elif shared is not None:
            self._claims.renew(group, shared)
        self._shared.pop(group.index, None)  # last: after a Ctrl-C before they still do

    def take_back(self, group: FlatGroup) -> None:
        """The flat buffer gives up its memory. Idempotent.

        Raises:
            UnsupportedModelError: somebody made a numpy array of a parameter, which nails its memory down for good.
        """
        group.free_flat()
        self._shared.pop(group.index, None)
        if (loan := self._loans.get(group.index)) is not None:
            loan.release()  # before it is forgotten, should a Ctrl-C come in between
            del self._loans[group.index]

    def leave(self, group: FlatGroup) -> None:
        """Tensors outside show the memory, which goes when the last of them does."""
        self._shared.pop(group.index, None)
        if (loan := self._loans.pop(group.index, None)) is not None:
            loan.abandon()

    def _borrow(self, group: FlatGroup, loan: Loan) -> None:
        self._loans[group.index] = loan
        group.borrow_flat(loan.memory)
