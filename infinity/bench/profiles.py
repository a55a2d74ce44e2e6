"""What is measured on a drive, as data: named profiles, each a few workloads.

The names are those of common disk benchmarks: `SEQ1M Q8T1` is sequential transfers of 1 MiB, eight at the same time,
from one stream. `offload` is what training does: transfers as large as a shard, cut into blocks by the backend, reads
and writes mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum

from infinity.errors import ConfigError
from infinity.sizes import KIB, MIB


class Order(StrEnum):
    """Where the next transfer lies."""

    SEQUENTIAL = "sequential"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of load on a drive.

    Attributes:
        profile: the profile it belongs to.
        read_percent: share of reads among the transfers; 100 reads only, 0 writes only.
        transfer_nbytes: bytes of one transfer, as its owner sees it; latencies are of transfers.
        block_nbytes: bytes of one system call; transfers are cut into blocks.
        depth: blocks at the drive at the same time.
        transfers: transfers in flight.
    """

    profile: str
    read_percent: int
    transfer_nbytes: int
    block_nbytes: int
    depth: int
    transfers: int
    order: Order = Order.SEQUENTIAL

    @property
    def mix(self) -> str:
        """`read`, `write`, or the shares, such as `75/25`."""
        return {100: "read", 0: "write"}.get(self.read_percent, f"{self.read_percent}/{100 - self.read_percent}")

    @property
    def name(self) -> str:
        return f"{self.profile} {self.mix}"

    @property
    def has_reads(self) -> bool:
        """Whether it reads at all."""
        return self.read_percent > 0

    @property
    def has_writes(self) -> bool:
        """Whether it writes at all."""
        return self.read_percent < 100


@dataclass(frozen=True, slots=True)
class Profile:
    """A named group of workloads."""

    name: str
    summary: str
    workloads: tuple[Workload, ...]
    repeats: int | None = None  # None: as asked for
    seconds: float | None = None


def block_load(
    profile: str, read_percent: int, block_nbytes: int, depth: int, order: Order = Order.SEQUENTIAL
) -> Workload:
    """A workload whose transfers are single blocks, as in other benchmarks."""
    return Workload(profile, read_percent, block_nbytes, block_nbytes, depth, depth, order)


def _offload(read_percent: int) -> Workload:
    return Workload("offload", read_percent, 16 * MIB, MIB, depth=4, transfers=4)


SEQ1M = Profile(
    "SEQ1M Q8T1", "1 MiB blocks in order, 8 deep", tuple(block_load("SEQ1M Q8T1", p, MIB, 8) for p in (100, 0, 50))
)
SEQ8M = Profile(
    "SEQ8M Q16", "8 MiB blocks in order, 16 deep", tuple(block_load("SEQ8M Q16", p, 8 * MIB, 16) for p in (100, 0, 50))
)
RND4K = Profile(
    "RND4K Q32",
    "4 KiB blocks anywhere, 32 deep",
    tuple(block_load("RND4K Q32", p, 4 * KIB, 32, Order.RANDOM) for p in (100, 0)),
)
RND4K_Q1 = Profile(
    "RND4K Q1",
    "4 KiB blocks anywhere, one at a time: latency",
    tuple(block_load("RND4K Q1", p, 4 * KIB, 1, Order.RANDOM) for p in (100, 0)),
)
OFFLOAD = Profile(
    "offload",
    "what training does: 16 MiB transfers in 1 MiB blocks, reads and writes 100/0, 75/25, 50/50, 25/75",
    tuple(_offload(p) for p in (100, 75, 50, 25)),
)
BUSY = next(workload for workload in OFFLOAD.workloads if workload.read_percent == 50)
"""What a drive does while memory is measured beside it."""
# Short: it only has to rank the settings for the configuration block.
SWEEP = Profile(
    "sweep",
    "16 MiB transfers, half of them reads, by block size and depth: finds the settings to use",
    tuple(
        Workload("sweep", 50, 16 * MIB, block, depth, transfers=max(4, -(-depth * block // (16 * MIB))))
        for block in (MIB, 4 * MIB)
        for depth in (2, 4, 8, 16)
    ),
    repeats=3,
    seconds=0.3,
)

PROFILES = (SEQ1M, SEQ8M, RND4K, RND4K_Q1, OFFLOAD, SWEEP)
DEFAULT_PROFILES = (OFFLOAD, SEQ1M, RND4K, SWEEP)


def find_profiles(names: Sequence[str]) -> tuple[Profile, ...]:
    """Profiles by name; case, blanks, `-` and `_` do not matter, and a name without its depth is enough.

    Raises:
        ConfigError: there is no such profile.
    """
    return tuple(_find(name) for name in names)


def _find(name: str) -> Profile:
    wanted = _plain(name)
    exact = [profile for profile in PROFILES if _plain(profile.name) == wanted]
    begun = [profile for profile in PROFILES if wanted and _plain(profile.name).startswith(wanted)]
    if exact or begun:
        return (exact or begun)[0]
    allowed = [profile.name for profile in PROFILES]
    near = get_close_matches(name.upper(), [known.upper() for known in allowed], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"--profile {name!r}: there is no such profile; {hint}allowed: {', '.join(allowed)}")


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def comparison(block_nbytes: int = MIB, depth: int = 8) -> Profile:
    """Reads, writes and both, one block per transfer: what `--compare-fio` runs on both sides."""
    return Profile(
        "comparison",
        "the same block size, depth and file as fio",
        tuple(block_load("comparison", p, block_nbytes, depth) for p in (100, 0, 50)),
    )
