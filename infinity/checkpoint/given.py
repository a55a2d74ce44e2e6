"""Tensors that the caller gives to be loaded: every rank its own, or the first rank for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from infinity.checkpoint.agreement import AllRanks, OneRank
from infinity.checkpoint.requests import Holdings, Request, Requests, requests

CHUNK_NUMEL = 1 << 20
Key = tuple[str, str]
"""Name of a parameter or buffer, and which tensor of it: "parameter", a moment, ..."""


class GivenTensors:
    """Gives elements of tensors that are here; a `load.Source`."""

    def __init__(self, tensors: Mapping[Key, torch.Tensor]) -> None:
        self._tensors = tensors

    def read(self, name: str, kind: str, start: int, into: torch.Tensor) -> None:
        """Fill `into` (1-D) with elements of a flattened tensor from `start` on; converts where the dtypes differ."""
        into.copy_(self._tensors[name, kind].detach().reshape(-1)[start : start + into.numel()])


class _OfFirstRank(GivenTensors):
    """The same over ranks, of which the first one has the tensors.

    Args:
        dtypes: in which they travel, by key; the same on all ranks.
    """

    def __init__(self, tensors: Mapping[Key, torch.Tensor], dtypes: Mapping[Key, torch.dtype]) -> None:
        super().__init__(tensors)
        self._dtypes = dtypes
        self._keys = list(dtypes)
        self._numbers = {key: number for number, key in enumerate(self._keys)}
        self._rounds: Requests | None = None

    @contextmanager
    def opened(self, ranks: AllRanks, what: str) -> Iterator[None]:
        with requests(ranks, what, Holdings(self._parts, self._blank, self._fill)) as self._rounds:
            yield

    def read(self, name: str, kind: str, start: int, into: torch.Tensor) -> None:
        if self._rounds is None:
            raise RuntimeError("tensors of the first rank are read between ranks that have met")
        for at in range(0, into.numel(), CHUNK_NUMEL):  # the first rank asks too, so that all keep step
            part = into[at : at + CHUNK_NUMEL]
            self._rounds.ask(Request(self._numbers[name, kind], 0, start + at, part.numel()), part)

    def _parts(self, asker: int, request: Request) -> Iterable[tuple[int, int, int]]:
        return [(0, request.start, request.stop)]

    def _blank(self, request: Request, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=self._dtypes[self._keys[request.tensor]])

    def _fill(self, request: Request, first: int, into: torch.Tensor) -> None:
        super().read(*self._keys[request.tensor], first, into)


@contextmanager
def given_tensors(
    tensors: Mapping[Key, torch.Tensor],
    dtypes: Mapping[Key, torch.dtype],
    ranks: AllRanks | None,
    what: str,
    *,
    from_first: bool,
) -> Iterator[GivenTensors]:
    """The tensors to load, for the length of a block that succeeds on all ranks or on none.

    Args:
        tensors: by key; with `from_first` those of other ranks than the first are not looked at.
        dtypes: with `from_first`, in which they are wanted: all keys, in the same order on all ranks.
        ranks: of several ranks, which have met.

    Raises:
        CheckpointError: the block failed on another rank.
    """
    if ranks is not None and from_first:
        source = _OfFirstRank(tensors, dtypes)
        with source.opened(ranks, what):
            yield source
    else:
        with (ranks or OneRank()).together(what):
            yield GivenTensors(tensors)
