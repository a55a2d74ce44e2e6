"""What a rank says first wherever ranks come together: one record of one size, whatever it is about.

So ranks that are not in the same place, because one of them has failed and gone on to something else, see that and say
so. gloo would end their processes, or take the one's bytes for the other's, for messages that differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.errors import RankError

RECORD_NUMEL = 5

# The first number of a record tells what it is about: a `lockstep.Want` (0 and more), or one of these.
TELLS = -1  # how something went that all do together; the next number says how many bytes follow
ASKS_FOR_TENSORS = -2
ENDS_ASKING = -3
FAILS_ASKING = -4

_ABOUT = {
    "are in a forward, a backward, a step or the like": range(1 << 16),
    "tell each other how something went that all do together, such as a save": range(TELLS, TELLS + 1),
    "ask each other for tensors, as an export does": range(FAILS_ASKING, ASKS_FOR_TENSORS + 1),
}


def record(first: int, *numbers: int) -> torch.Tensor:
    """A record of these numbers."""
    made = torch.zeros(RECORD_NUMEL, dtype=torch.int64)
    made[: 1 + len(numbers)] = torch.tensor([first, *numbers])
    return made


def refuse_mixed(records: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
    """Look at what all ranks have said.

    Raises:
        RankError: it is about different things.
    """
    found = {
        about: [rank for rank, said in zip(ranks, records, strict=True) if said[0] in numbers]
        for about, numbers in _ABOUT.items()
    }
    if sum(map(bool, found.values())) > 1:
        told = ", ".join(f"ranks {here} {about}" for about, here in found.items() if here)
        raise RankError(
            f"the ranks disagree: {told}. All of them have to do the same; one that has failed may have gone on to "
            "something else"
        )
