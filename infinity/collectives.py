"""Transfers between ranks. Issued by the training thread only, at points that `lockstep` makes all ranks agree on.

[Note: two kinds of transfers]
What ranks tell each other (`exchange`) is a few numbers on the CPU; it is waited for in slices, so that a rank that
left or failed is noticed at once. Spans of flat buffers follow only when all ranks have agreed to move them.

[Note: spans without hidden memory]
With gloo every rank sends its span straight to where the others want it: the bytes on the wire are those of a ring,
nothing is held beside the buffers that the caller has counted, and ranks that do not take part move nothing. With NCCL
all ranks of a row take part in every transfer, with a buffer that is thrown away if they have no use for it.

[Note: order of summation]
A gradient is summed in the order of the ranks of a row, then of the rows, and divided by their number at last; so all
stages give the same bits, in every run. NCCL sums in its own order.
"""

from __future__ import annotations

import atexit
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from hashlib import blake2b

import torch
import torch.distributed as dist

from infinity.announcements import TELLS, record, refuse_mixed
from infinity.bulletin import Bulletin
from infinity.errors import RankError, cause_for
from infinity.layout import FlatSpan
from infinity.ranks import Ranks
from infinity.rendezvous import new_name
from infinity.torch_compat import Channel, job_store
from storage.forks import in_this_process

_POLL = timedelta(milliseconds=500)
_LAST_WORDS_S = 2.0  # how long a rank whose connection broke may take to say why


class Collectives:
    """Transfers between the ranks of a grid, over process groups of their own. Used by the training thread.

    Args:
        ranks: the grid; more than one rank.
        device: where flat buffers are.
        timeout_s: how long to wait for other ranks.
    """

    def __init__(self, ranks: Ranks, device: torch.device, timeout_s: float) -> None:
        self.ranks = ranks
        self.uses_nccl = device.type == "cuda"
        self._timeout_s = timeout_s
        timeout = timedelta(seconds=timeout_s)
        name = new_name(ranks)
        self._channel = Channel(name, ranks.member, ranks.size, "cpu", timeout)
        self._row = self._column = self._channel
        if self.uses_nccl:
            self._row = Channel(f"{name}/row{ranks.replica}", ranks.shard, ranks.shards, "cuda", timeout)
            self._column = Channel(f"{name}/column{ranks.shard}", ranks.replica, ranks.replicas, "cuda", timeout)
        self._name = name
        self._store = job_store(name)
        self._bulletins = 0
        self._broken: str | None = None  # why nothing can be transferred any more
        self._last_error: str | None = None
        self._has_left = False
        self.sent_nbytes = 0
        self.received_nbytes = 0
        self._at_exit = in_this_process(self._leave_at_exit)
        atexit.register(self._at_exit)

    # What ranks tell each other --------------------------------------------------------------------------------

    def exchange(self, mine: torch.Tensor) -> torch.Tensor:
        """Gather equal 1-D CPU tensors of all members: row m of the result is member m's.

        Raises:
            RankError: a rank has left, failed, or is not there within the timeout.
        """
        everyone = mine.new_empty(self.ranks.size * mine.numel())
        try:
            self._wait(self._channel.all_gather(everyone, mine))
        except RuntimeError as error:
            explained = self._explain(error)
            raise explained from cause_for(explained, error)
        return everyone.view(self.ranks.size, mine.numel())

    def announce(self, first: int, *numbers: int) -> torch.Tensor:
        """What every member says first; see `infinity.announcements`. Row m of the result is member m's record.

        Raises:
            RankError: as `exchange`; or others are somewhere else.
        """
        records = self.exchange(record(first, *numbers))
        refuse_mixed(records.tolist(), self.ranks.members)
        return records

    def exchange_bytes(self, mine: bytes) -> list[bytes]:
        """What every member has to say, by number; of different sizes.

        Raises:
            RankError: as `announce`.
        """
        sizes = self.announce(TELLS, len(mine))[:, 1]
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        if not padded.numel():
            return [b""] * self.ranks.size
        if mine:
            padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        return [row[: int(size)].numpy().tobytes() for row, size in zip(self.exchange(padded), sizes, strict=True)]

    def exchange_text(self, mine: str) -> list[str]:
        """Texts of all members."""
        return [theirs.decode() for theirs in self.exchange_bytes(mine.encode())]

    def bulletin(self) -> Bulletin:
        """A place for notes of something that goes on behind the training thread; a call of all members."""
        self._bulletins += 1
        return Bulletin(job_store(f"{self._name}/bulletin{self._bulletins}"), self._refuse_gone, self._timeout_s)

    def local_size(self) -> int:
        """Members on this machine, itself included."""
        name = blake2b(socket.gethostname().encode(), digest_size=7).digest()
        names = self.exchange(torch.tensor([int.from_bytes(name)]))
        return int((names == names[self.ranks.member]).sum())

    # Spans -----------------------------------------------------------------------------------------------------

    def gather(self, flat: torch.Tensor, span_of: Callable[[int], FlatSpan], wanting: Collection[int]) -> None:
        """Fill a flat buffer that holds this rank's span with those of the other ranks of its row.

        Args:
            span_of: the span of every shard.
            wanting: members that gather; this one and, with NCCL, all of its row take part.
        """
        mine = flat[_slice(span_of(self.ranks.shard))]
        if self.uses_nccl:
            self._run(lambda: [self._row.all_gather_in_place(flat, mine)])
            self._count(len(self.ranks.row) - 1, mine.nbytes, received_nbytes=flat.nbytes - mine.nbytes)
            return
        sends = [(peer, mine) for peer in self._others(self.ranks.row) if peer in wanting]
        receives = [(peer, flat[_slice(span_of(self._shard(peer)))]) for peer in self._others(self.ranks.row)]
        self._swap(sends, receives)

    def lend(self, own: torch.Tensor, wanting: Collection[int]) -> None:
        """Send this rank's span to the members of its row that gather, without gathering (not with NCCL)."""
        self._swap([(peer, own) for peer in self._others(self.ranks.row) if peer in wanting], [])

    def trade(
        self, own: torch.Tensor, targets: Iterator[tuple[int, torch.Tensor]]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Send a CPU tensor to the other ranks of the row and receive theirs, one by one.

        Args:
            targets: shards, and where theirs goes; each is asked for when the one before has been dealt with.

        Yields:
            What `targets` gave, filled.
        """
        row = self.ranks.row
        sending = self._start_sends([(peer, own) for peer in self._others(row)])
        for shard, target in targets:
            self.receive(target, row[shard])
            yield shard, target
        self._run(lambda: sending)

    def send(self, values: torch.Tensor, member: int) -> None:
        """Give a contiguous CPU tensor to one member, which calls `receive` at the same point."""
        self._swap([(member, values)], [])

    def receive(self, values: torch.Tensor, member: int) -> None:
        """Fill a contiguous CPU tensor with what a member sends."""
        self._swap([], [(member, values)])

    def scatter(self, mine: torch.Tensor, make: Callable[[int], torch.Tensor] | None) -> None:
        """Fill `mine`, a CPU tensor, with what member 0 makes for this one.

        Args:
            make: on member 0: the values of every other member, of equal size; one is made at a time.
        """
        if make is None:
            self.receive(mine, 0)
        else:
            for member in range(1, self.ranks.size):
                self.send(make(member), member)

    def reduce(
        self,
        flat: torch.Tensor | None,
        total: torch.Tensor,
        spare: Sequence[torch.Tensor],
        span_of: Callable[[int], FlatSpan],
        contributing: Collection[int],
    ) -> None:
        """Average flat buffers: `total` becomes this rank's span of their sum divided by the number of all members.

        Args:
            flat: this rank's contribution; None when it has none (with NCCL: then zeros).
            spare: buffers of the size of `total`: one, or two with several rows.
            contributing: members that have a contribution; the others count as zero.
        """
        if self.uses_nccl:
            self._reduce_nccl(flat, total)
        else:
            self._reduce_row(flat, total, spare[0], span_of, contributing)
            if self.ranks.replicas > 1:
                self._reduce_column(total, spare[0], spare[1])
        total.div_(self.ranks.size)

    def _reduce_nccl(self, flat: torch.Tensor | None, total: torch.Tensor) -> None:
        if flat is None:
            raise ValueError("with NCCL every rank contributes")
        self._run(lambda: [self._row.reduce_scatter(total, flat)])
        self._count(len(self.ranks.row) - 1, total.nbytes)
        if self.ranks.replicas > 1:
            self._run(lambda: [self._column.all_reduce(total)])
            self._count(len(self.ranks.column) - 1, total.nbytes)

    def _reduce_row(
        self,
        flat: torch.Tensor | None,
        total: torch.Tensor,
        spare: torch.Tensor,
        span_of: Callable[[int], FlatSpan],
        contributing: Collection[int],
    ) -> None:
        member = self.ranks.member
        sending: list[dist.Work] = []
        if flat is not None:
            parts = [(peer, flat[_slice(span_of(self._shard(peer)))]) for peer in self._others(self.ranks.row)]
            sending = self._start_sends(parts)
        total.zero_()
        for peer in (peer for peer in self.ranks.row if peer in contributing):
            if peer == member and flat is not None:
                total.add_(flat[_slice(span_of(self.ranks.shard))])
            else:
                self.receive(spare, peer)
                total.add_(spare)
        self._run(lambda: sending)

    def _reduce_column(self, total: torch.Tensor, own: torch.Tensor, spare: torch.Tensor) -> None:
        own.copy_(total)
        sending = self._start_sends([(peer, own) for peer in self._others(self.ranks.column)])
        total.zero_()
        for peer in self.ranks.column:
            if peer == self.ranks.member:
                total.add_(own)
            else:
                self.receive(spare, peer)
                total.add_(spare)
        self._run(lambda: sending)

    # Ends ------------------------------------------------------------------------------------------------------

    def note_error(self, error: BaseException) -> None:
        """Remember what went wrong here; others are told when this rank leaves."""
        self._last_error = f"{type(error).__name__}: {error}"

    def end(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close, as the end of a `with` block: what it failed with is what others are told."""
        if error is not None:
            self.note_error(error)
        self.close()

    def close(self) -> None:
        """Tell the others that this rank takes part in nothing any more. Idempotent."""
        if self._has_left:
            return
        atexit.unregister(self._at_exit)
        self._leave()
        for channel in (self._row, self._column, self._channel):
            channel.close()

    def _leave(self) -> None:
        self._has_left = True
        try:
            self._store.set(f"left/{self.ranks.member}", self._last_error or "")
        except RuntimeError:
            return  # whoever keeps the store has gone already; the others notice that by themselves

    def _leave_at_exit(self) -> None:
        """The interpreter ends: an exception that nobody caught is why."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if isinstance(error, BaseException):
            self.note_error(error)
        self._leave()

    # Parts -----------------------------------------------------------------------------------------------------

    def _shard(self, member: int) -> int:
        return member % self.ranks.shards

    def _others(self, members: Iterable[int]) -> list[int]:
        return [member for member in members if member != self.ranks.member]

    def _swap(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        def start() -> list[dist.Work]:
            works = self._start_sends(sends)
            for peer, tensor in receives:
                works.append(self._channel.receive(tensor, peer))
                self.received_nbytes += tensor.nbytes
            return works

        self._run(start)

    def _start_sends(self, sends: Sequence[tuple[int, torch.Tensor]]) -> list[dist.Work]:
        for _, tensor in sends:
            self.sent_nbytes += tensor.nbytes
        return [self._channel.send(tensor, peer) for peer, tensor in sends]

    def _count(self, peers: int, sent_nbytes: int, received_nbytes: int | None = None) -> None:
        self.sent_nbytes += peers * sent_nbytes
        self.received_nbytes += peers * sent_nbytes if received_nbytes is None else received_nbytes

    def _run(self, start: Callable[[], Sequence[dist.Work]]) -> None:
        """Start transfers and wait for them; each may take as long as the timeout.

        Not in slices, as in `_wait`: gloo gives up all connections of a rank when one of its waits is over, and NCCL
        would keep the host waiting, which otherwise only orders the stream. Its own watchdog bounds it.
        """
        limit = () if self.uses_nccl else (timedelta(seconds=self._timeout_s),)
        try:
            for work in start():
                work.wait(*limit)
        except RuntimeError as error:
            explained = self._explain(error)
            raise explained from cause_for(explained, error)

    def _wait(self, work: dist.Work) -> None:
        """Wait in slices, looking in between whether somebody has left."""
        while not work.is_completed():
            try:
                work.wait(_POLL)
            except RuntimeError:
                if work.is_completed():
                    raise
                self._refuse_left()
        work.wait()  # it is over, and raises here if it failed before anybody looked

    def _refuse_left(self) -> None:
        if left := self._who_left():
            self._broken = left
            raise RankError(left)

    def _refuse_gone(self, member: int) -> None:
        """Raise RankError when a member has left, or the transfers of this rank have failed. For any thread."""
        if reason := self._broken or self._who_left([member]):
            raise RankError(reason)

    def _who_left(self, members: Iterable[int] | None = None) -> str | None:
        """In words, who of some members (or of all) takes part no more and why; None when nobody said so."""
        words = []
        for member in self._others(range(self.ranks.size) if members is None else members):
            try:
                there = self._store.check([f"left/{member}"])
                reason = self._store.get(f"left/{member}").decode() if there else ""
            except RuntimeError:
                return None  # the store went with the process that kept it
            if there:
                name = f"rank {self.ranks.members[member]}"
                words.append(f"{name} failed with {reason}" if reason else f"{name} has closed its engine or ended")
        return "; ".join(words) + ". This rank cannot go on without it" if words else None

    def _explain(self, error: RuntimeError) -> BaseException:
        """What a failed transfer means: the reason that a rank gave when it left, if it did."""
        if isinstance(error, RankError):
            return error
        until_s = time.monotonic() + _LAST_WORDS_S
        while (left := self._who_left()) is None and time.monotonic() < until_s:
            time.sleep(0.05)
        if left is None:
            said = (str(error).splitlines() or [repr(error)])[0]
            left = (
                f"a transfer between ranks {list(self.ranks.members)} failed on rank {self.ranks.global_rank}: a rank "
                f"has died without a word or was not there within {self._timeout_s:g} s (rank_timeout_s); see the "
                f"other ranks' output. First line of what the transfer said: {said}"
            )
        self._broken = left
        return RankError(left)


def _slice(span: FlatSpan) -> slice:
    return slice(span.start, span.stop)
