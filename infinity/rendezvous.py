"""Ranks before they have an engine: what they tell each other over the job's store, and a name for what follows."""

from __future__ import annotations

from datetime import timedelta
from hashlib import blake2b

from infinity.errors import RankError
from infinity.ranks import Ranks
from infinity.torch_compat import job_store


def exchange_early(ranks: Ranks, mine: str, timeout_s: float) -> list[str]:
    """Texts of all members, before there is an engine.

    Raises:
        RankError: a rank is not there within the timeout.
    """
    store = job_store(f"{new_name(ranks)}/early/")
    store.set(str(ranks.member), mine)
    keys = [str(member) for member in range(ranks.size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
        return [store.get(key).decode() for key in keys]
    except RuntimeError as error:
        raise RankError(
            f"not all of ranks {list(ranks.members)} were there within {timeout_s:g} s (rank_timeout_s): {error}"
        ) from error


def new_name(ranks: Ranks) -> str:
    """A name for what one engine's ranks tell each other: who they are, and their how-manieth engine it is."""
    name = f"infinity/{blake2b(repr(ranks.grid).encode(), digest_size=12).hexdigest()}"
    return f"{name}/{job_store(name).add(f'engines of {ranks.member}', 1)}"
