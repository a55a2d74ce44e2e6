"""Lockstep: all ranks move the same spans in the same order, whatever order their models run in.

Wherever a rank needs others it announces what it wants and hears what everybody else wants: one *round*. All that was
asked for in a round is done in it, by all ranks, in one order; a rank that has not asked for it lends its span or adds
nothing. So ranks may run different branches, other experts, or another number of forwards, and nobody waits for a
transfer that the others never start.

A rank that has nothing to ask for, because it is at the end of a forward, of a backward or in front of a step, goes on
taking part in the rounds of the others until they are at such a *boundary* too. Between boundaries the user's code may
use collectives of its own. A step is applied only when every rank is in front of the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import IntEnum

import torch

from infinity.collectives import Collectives
from infinity.errors import RankError
from infinity.groups import FlatGroup
from infinity.layout import FlatSpan
from infinity.observe.stalls import StallCause, StallClock


class Want(IntEnum):
    """What a rank announces in a round; transfers are done in this order."""

    GATHER = 0
    REDUCE = 1
    # Boundaries that are left when every rank is at one.
    END_FORWARD = 10
    END_BACKWARD = 11
    # Boundaries that are left together.
    CLIP = 20
    STEP = 21
    SETUP = 22
    UNSCALE = 23
    SAVE = 24
    LOAD = 25
    OPTIMIZER_STATE = 26
    RESTORE = 27
    EXPORT = 28
    MODEL_STATE = 29
    WEAR = 30


_TOGETHER = frozenset(want for want in Want if want >= Want.CLIP)
_NAMES = {
    Want.GATHER: "needs parameters of {}",
    Want.REDUCE: "has a gradient of {}",
    Want.END_FORWARD: "has ended its forward",
    Want.END_BACKWARD: "has ended its backward",
    Want.CLIP: "clips its gradients",
    Want.STEP: "is in optimizer.step()",
    Want.UNSCALE: "takes the loss scale out",
    Want.SETUP: "is in infinity.offload()",
    Want.SAVE: "saves a checkpoint",
    Want.LOAD: "loads a checkpoint",
    Want.RESTORE: "goes back to its last commit",
    Want.EXPORT: "exports the weights",
    Want.MODEL_STATE: "asks for, or loads, the model's state dict",
    Want.WEAR: "asks whether its wear budget is spent",
    Want.OPTIMIZER_STATE: "asks for, or loads, the optimizer's state_dict()",
}

Lend = Callable[[FlatGroup, Collection[int]], None]
Join = Callable[[FlatGroup, Collection[int], torch.Tensor | None, bool], None]


class Lockstep:
    """Runs the rounds. Used by the training thread.

    Args:
        stalls: what waiting for other ranks is charged to.
    """

    def __init__(self, collectives: Collectives, stalls: StallClock) -> None:
        self.collectives = collectives
        self.stalls = stalls
        self._groups: Sequence[FlatGroup] = ()
        self._lend: Lend | None = None
        self._join: Join | None = None
        self.rounds = 0
        self.served = 0  # transfers that other ranks asked for

    def serve(self, groups: Sequence[FlatGroup], lend: Lend, join: Join) -> None:
        """What a rank does for others.

        Args:
            lend: gives this rank's span of a group's parameters to the members that gather it.
            join: takes part in the reduction of a group's gradient, to which the given members contribute, this one
                with the given flat buffer; and is told whether it is complete, because every rank has said that its own
                contribution is.
        """
        self._groups, self._lend, self._join = groups, lend, join

    def gather(self, group: FlatGroup) -> None:
        """Fill the group's flat buffer, which holds this rank's span, with those of the others.

        Raises:
            RankError: another rank has failed or left.
        """
        self._round(Want.GATHER, group.index)

    def reduce(self, group: FlatGroup, flat: torch.Tensor, *, is_final: bool) -> None:
        """Average a gradient over all ranks; `join` gets the result.

        Args:
            is_final: nothing more will come from this rank in this backward.

        Raises:
            RankError: another rank has failed or left.
        """
        self._round(Want.REDUCE, group.index, flat, is_final)

    def end(self, boundary: Want) -> None:
        """Take part in the rounds of the others until all are at a boundary.

        Raises:
            RankError: another rank has failed or left.
        """
        while min(row[0] for row in self._round(boundary, 0)) < Want.END_FORWARD:
            pass

    def meet(self, boundary: Want, *values: int) -> list[list[int]]:
        """Take part in the rounds of the others until all are at the same boundary; gives what each of them brings.

        Raises:
            RankError: another rank has failed or left, or waits at another boundary.
        """
        while True:
            asked = self._round(boundary, 0, None, *values)
            wants = [Want(row[0]) for row in asked]
            if all(want in _TOGETHER for want in wants):
                if len(set(wants)) > 1:
                    raise RankError(f"the ranks disagree: {self._describe(asked)}. All of them have to do the same")
                return [row[2:] for row in asked]

    def agree(self, boundary: Want, what: str, *values: int, brings: Sequence[int] = ()) -> list[list[int]]:
        """Meet, and make sure that all ranks bring the same numbers.

        Args:
            brings: further numbers, which may differ; what each of the ranks brings of them is the result.

        Raises:
            RankError: they do not; or as `meet`.
        """
        brought = self.meet(boundary, *values, *brings)
        if any(row[: len(values)] != list(values) for row in brought):
            names = [f"rank {rank}: {row[: len(values)]}" for rank, row in self._by_rank(brought)]
            raise RankError(f"{what} differ between the ranks ({'; '.join(names)})")
        return [row[len(values) : len(values) + len(brings)] for row in brought]

    def announce(self, first: int, *numbers: int) -> list[list[int]]:
        """What all ranks say first, by member; see `infinity.announcements`."""
        with self.stalls.charged(StallCause.RANKS):
            records: list[list[int]] = self.collectives.announce(first, *numbers).tolist()
        return records

    def exchange(self, mine: torch.Tensor) -> torch.Tensor:
        """Gather equal 1-D CPU tensors of all ranks after they have met; row m is member m's."""
        with self.stalls.charged(StallCause.RANKS):
            return self.collectives.exchange(mine)

    def exchange_text(self, mine: str) -> list[str]:
        """Texts of all ranks, after they have met, by member."""
        with self.stalls.charged(StallCause.RANKS):
            return self.collectives.exchange_text(mine)

    def exchange_bytes(self, mine: bytes) -> list[bytes]:
        """The same in bytes."""
        with self.stalls.charged(StallCause.RANKS):
            return self.collectives.exchange_bytes(mine)

    def _round(self, want: Want, index: int, flat: torch.Tensor | None = None, *values: int) -> list[list[int]]:
        self.rounds += 1
        asked = self.announce(want, index, *values)
        for kind, number in sorted({(row[0], row[1]) for row in asked if row[0] < Want.END_FORWARD}):
            askers = frozenset(member for member, row in enumerate(asked) if row[:2] == [kind, number])
            asks_it = (want, index) == (kind, number)
            self.served += not asks_it
            is_complete = len(askers) == len(asked) and all(row[2] for row in asked)
            self._move(Want(kind), self._groups[number], askers, flat if asks_it else None, is_complete)
        return asked

    def _move(
        self, kind: Want, group: FlatGroup, askers: frozenset[int], flat: torch.Tensor | None, is_complete: bool
    ) -> None:
        ranks = self.collectives.ranks
        if self._lend is None or self._join is None:
            raise RankError(f"another rank asks for {group.key} before this engine is ready")
        if kind is Want.REDUCE:
            self._join(group, askers, flat, is_complete)
        elif ranks.member in askers:
            with self.stalls.charged(StallCause.RANKS):
                self.collectives.gather(group.flat.data, group.span_of, askers)
        elif not askers.isdisjoint(ranks.row):
            self._lend(group, askers)

    def gather_now(self, flat: torch.Tensor, span_of: Callable[[int], FlatSpan]) -> None:
        """Fill `flat` from the whole row, in a round in which all of it takes part."""
        with self.stalls.charged(StallCause.RANKS):
            self.collectives.gather(flat, span_of, self.collectives.ranks.row)

    def lend_now(self, own: torch.Tensor, wanting: Collection[int]) -> None:
        """Send this rank's span to the members of its row that gather in this round."""
        with self.stalls.charged(StallCause.RANKS):
            self.collectives.lend(own, wanting)

    def _describe(self, asked: Sequence[Sequence[int]]) -> str:
        told = []
        for rank, (want, index, *_) in self._by_rank(asked):
            told.append(f"rank {rank} {_NAMES[Want(want)].format(self._groups[index].key if self._groups else index)}")
        return ", ".join(told)

    def _by_rank(self, rows: Sequence[Sequence[int]]) -> list[tuple[int, Sequence[int]]]:
        return list(zip(self.collectives.ranks.members, rows, strict=True))
