"""Ranks that save or load together: each step succeeds on all of them or fails on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from infinity.checkpoint.format import DamagedCheckpointError
from infinity.errors import CheckpointError, RankError
from infinity.lockstep import Lockstep

_DAMAGED = "damaged"


class Agreement(Protocol):
    """What saving and loading ask of the ranks."""

    @property
    def member(self) -> int:
        """This rank's number among those of the engine."""

    def together(self, what: str) -> AbstractContextManager[None]:
        """A block that fails on every rank if it fails on one.

        Raises:
            CheckpointError: another rank has failed, with what it says.
        """


class OneRank:
    """Nobody to agree with."""

    member = 0

    def together(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()


class AllRanks:
    """The ranks of a lockstep, which have met. Every rank goes through the same blocks."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.collectives = lockstep.collectives
        self._exchange = lockstep.exchange_text

    @property
    def member(self) -> int:
        return self.collectives.ranks.member

    def texts(self, mine: str) -> list[str]:
        """What every rank says, in the order of their numbers."""
        return self._exchange(mine)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        try:
            yield
        except RankError:
            raise  # there is nobody to tell
        except BaseException as error:
            kind = _DAMAGED if isinstance(error, DamagedCheckpointError) else "failed"
            self._exchange(f"{kind}: {type(error).__name__}: {error}")
            raise
        said = self._exchange("")
        for rank, text in zip(self.collectives.ranks.members, said, strict=True):
            if text:
                kind, _, reason = text.partition(": ")
                error_class = DamagedCheckpointError if kind == _DAMAGED else CheckpointError
                raise error_class(f"{what} failed on rank {rank}: {reason}")
