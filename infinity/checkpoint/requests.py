"""Ranks ask each other for elements of tensors, in rounds, so that a whole tensor is nowhere but where it is wanted.

In a round every rank says what it asks for, or that it asks for nothing more; then all of it is moved, asker by asker,
in the order of their numbers. The rounds end when nobody asks any more. A rank that fails says so in the next round,
and all ranks stop with its error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from enum import IntEnum

import torch

from infinity.announcements import ASKS_FOR_TENSORS, ENDS_ASKING, FAILS_ASKING
from infinity.checkpoint.agreement import AllRanks
from infinity.errors import CheckpointError, RankError


@dataclass(frozen=True, slots=True)
class Request:
    """Elements `start` to `start + numel` of a flattened tensor; `tensor` and `kind` by number."""

    tensor: int
    kind: int
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


_NOTHING = Request(0, 0, 0, 0)


class Holdings:
    """Who has which elements, and what this rank has.

    Attributes:
        parts: of a request by a member: the members that have its elements, with the first and the last of each.
        blank: an empty tensor, 1-D on the CPU, for so many elements of a request, in the dtype in which they travel.
        fill: fill such a tensor with this rank's elements, from the given one on.
    """

    def __init__(
        self,
        parts: Callable[[int, Request], Iterable[tuple[int, int, int]]],
        blank: Callable[[Request, int], torch.Tensor],
        fill: Callable[[Request, int, torch.Tensor], None],
    ) -> None:
        self.parts = parts
        self.blank = blank
        self.fill = fill


class _Turn(IntEnum):
    """What a rank says in a round."""

    ASKS = ASKS_FOR_TENSORS
    ENDED = ENDS_ASKING
    FAILED = FAILS_ASKING


class Requests:
    """The rounds, seen from one rank; see `requests`. Used by the training thread.

    Args:
        ranks: they have met, and make the same rounds.
        what: what it is all for, for messages.
    """

    def __init__(self, ranks: AllRanks, what: str, holdings: Holdings) -> None:
        self._ranks = ranks
        self._what = what
        self._holdings = holdings
        self._failure: Exception | None = None
        self._is_over = False

    def ask(self, request: Request, into: torch.Tensor) -> None:
        """Fill `into` (1-D) with elements that ranks have; converts where the dtypes differ.

        Raises:
            CheckpointError: another rank has failed.
            RankError: another rank has left.
        """
        self._round(_Turn.ASKS, request, into)

    def end(self) -> None:
        """Ask for nothing more, and give the others what they ask for until they have ended too.

        Raises:
            CheckpointError, RankError: as `ask`. And what kept this rank from giving its part.
        """
        while not self._round(_Turn.ENDED):
            pass

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on: tell the others, unless they know."""
        if not self._is_over and isinstance(error, Exception) and not isinstance(error, RankError):
            self._failure = error
            self._say(_Turn.FAILED)
            self._tell()

    def _round(self, turn: _Turn, request: Request = _NOTHING, into: torch.Tensor | None = None) -> bool:
        """Whether all ranks have ended."""
        asked = self._say(_Turn.FAILED if self._failure is not None else turn, request)
        if any(row[0] == _Turn.FAILED for row in asked):
            self._stop()
        for asker, (theirs, *place) in enumerate(asked):
            if theirs == _Turn.ASKS:
                self._move(asker, Request(*place), into)
        return all(row[0] == _Turn.ENDED for row in asked)

    def _say(self, turn: _Turn, request: Request = _NOTHING) -> list[list[int]]:
        return self._ranks.announce(turn, *astuple(request))

    def _move(self, asker: int, request: Request, into: torch.Tensor | None) -> None:
        """Bring elements to a rank; all ranks pass by here in the same order, so nobody waits for one that waits."""
        me = self._ranks.member
        for holder, first, last in self._holdings.parts(asker, request):
            if me not in (asker, holder):
                continue
            values = self._holdings.blank(request, last - first)
            if me == holder:
                self._fill(request, first, values)
            if me == holder != asker:
                self._ranks.send(values, asker)
            elif me == asker != holder:
                self._ranks.receive(values, holder)
            if me == asker and into is not None:
                into[first - request.start : last - request.start].copy_(values)

    def _fill(self, request: Request, first: int, values: torch.Tensor) -> None:
        if self._failure is None:
            try:
                self._holdings.fill(request, first, values)
            except Exception as error:  # raised in the next round: the asker waits for the elements now
                self._failure = error

    def _stop(self) -> None:
        """Somebody has failed: raise it, on that rank as it is."""
        said = self._tell()
        if self._failure is not None:
            raise self._failure
        for rank, text in zip(self._ranks.members, said, strict=True):
            if text:
                raise CheckpointError(f"{self._what} failed on rank {rank}: {text}")

    def _tell(self) -> list[str]:
        self._is_over = True
        error = self._failure
        return self._ranks.texts("" if error is None else f"{type(error).__name__}: {error}")


@contextmanager
def requests(ranks: AllRanks, what: str, holdings: Holdings) -> Iterator[Requests]:
    """Rounds for the length of a block, in which a rank may ask; at its end it serves the others until they have ended.

    Raises:
        CheckpointError: the block has failed on another rank, or its part of something cannot be read there.
    """
    made = Requests(ranks, what, holdings)
    try:
        yield made
        made.end()
    except BaseException as error:
        made.fail(error)
        raise
