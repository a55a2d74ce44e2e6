"""Ranks that save or load together: each step succeeds on all of them or fails on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from infinity.checkpoint.format import DamagedCheckpointError
from infinity.errors import CheckpointError, CheckpointNotFoundError, RankError
from infinity.lockstep import Lockstep
from infinity.observe.stalls import StallCause

_KINDS = {"damaged": DamagedCheckpointError, "not found": CheckpointNotFoundError}


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
        self._lockstep = lockstep

    @property
    def member(self) -> int:
        return self.collectives.ranks.member

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks, by number among those of the engine."""
        return self.collectives.ranks.members

    def texts(self, mine: str) -> list[str]:
        """What every rank says, in the order of their numbers."""
        return self._lockstep.exchange_text(mine)

    def exchange_bytes(self, mine: bytes) -> list[bytes]:
        """The same in bytes."""
        return self._lockstep.exchange_bytes(mine)

    def announce(self, first: int, *numbers: int) -> list[list[int]]:
        """What all ranks say first, by member; see `infinity.announcements`."""
        return self._lockstep.announce(first, *numbers)

    def send(self, values: torch.Tensor, member: int) -> None:
        """Give a CPU tensor to a member, which receives it now."""
        with self._lockstep.stalls.charged(StallCause.RANKS):
            self.collectives.send(values, member)

    def receive(self, values: torch.Tensor, member: int) -> None:
        """Fill a CPU tensor with what a member sends now."""
        with self._lockstep.stalls.charged(StallCause.RANKS):
            self.collectives.receive(values, member)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        try:
            yield
        except RankError:
            raise  # there is nobody to tell
        except BaseException as error:
            kind = next((name for name, one in _KINDS.items() if isinstance(error, one)), "failed")
            self.texts(f"{kind}: {type(error).__name__}: {error}")
            raise
        said = self.texts("")
        for rank, text in zip(self.members, said, strict=True):
            if text:
                kind, _, reason = text.partition(": ")
                error_class = _KINDS.get(kind, CheckpointError)
                raise error_class(f"{what} failed on rank {rank}: {reason}")
