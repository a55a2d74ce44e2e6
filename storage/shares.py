"""How much of a key each drive gets: arithmetic on speeds, pure.

A key that is moved from all drives at once is there when the last drive is done, so its pieces are in proportion to
the drives' speeds. A key too small to be cut goes whole to one drive, which is chosen so that the drives would be done
with everything they hold at the same time: then keys are in proportion to the speeds, if not the pieces of each.

[Note: runs of small keys]
When speeds change, small keys move in the order in which they are written, until the drives are even: those written
first all go to the faster drive, those written last stay. A reader that takes them in that order then waits for one
drive at a time. What that can cost is bounded by the bytes of keys below one piece per drive: norms and biases beside
blocks of hundreds of MiB. Deciding by what was written lately would spread them, but would move keys back and forth
between drives that are even, and would let keys that are never written again (frozen weights) unbalance the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from storage.types import Op

MIN_PIECE_NBYTES = 1 << 20  # smaller pieces cost more operations than another drive gains
QUANTUM_NBYTES = 256 << 10  # pieces are cut at multiples of it, so that what one frees the next one fits into
# A new layout has to be faster by this much: speeds are measured, and never twice the same. What is lost by staying is
# no more than that, and moving costs no transfer.
_HYSTERESIS = 0.0625


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of the drives' speed in one direction.

    Attributes:
        nbytes_per_s: by drive; None where nothing was measured lately.
        at_most_nbytes_per_s: by drive, what it cannot be faster than just now; infinite where nothing is known.
        moved_nbytes: over all drives, since the beginning.
    """

    nbytes_per_s: Sequence[float | None]
    at_most_nbytes_per_s: Sequence[float]
    moved_nbytes: int


def speeds_of(measured: Mapping[Op, Measured], given: Sequence[float]) -> list[float] | None:
    """Speed of each drive over both directions, in bytes/s, weighted by what was moved; None if nothing was measured.

    Args:
        given: the drives' speeds as far as was known before, in any unit. A drive that was not measured counts as
            being to the others as it is there.
    """
    seconds_per_byte = [0.0] * len(given)
    moved_nbytes = 0
    for one in measured.values():
        ratios = [speed / known for speed, known in zip(one.nbytes_per_s, given, strict=True) if speed is not None]
        if not ratios:
            continue
        moved_nbytes += one.moved_nbytes
        for drive, speed in enumerate(one.nbytes_per_s):
            expected = fmean(ratios) * given[drive] if speed is None else speed
            seconds_per_byte[drive] += one.moved_nbytes / max(1.0, min(expected, one.at_most_nbytes_per_s[drive]))
    return [moved_nbytes / seconds for seconds in seconds_per_byte] if moved_nbytes else None


Shares = list[tuple[int, int]]
"""How many bytes of a span go to which drive, as (drive, nbytes), in the order of its bytes."""


def rotated(drives: int, first: int) -> list[int]:
    """The drives beginning with one of them: from key to key with the next, the beginnings of keys spread too."""
    return [(first + number) % drives for number in range(drives)]


def split(
    nbytes: int, speeds: Sequence[float], held_nbytes: Sequence[int], order: Sequence[int] | None = None
) -> Shares:
    """How many bytes of a span go to which drive.

    Args:
        nbytes: size of the span, a page multiple.
        speeds: by drive, in any unit; 0 for a drive that takes nothing.
        held_nbytes: what each drive holds already.
        order: all drives, as the bytes of the span are to lie on them; by number if None.

    Raises:
        ValueError: no drive takes anything.
    """
    everyone = [drive for drive in (order or range(len(speeds))) if speeds[drive] > 0]
    takers = list(everyone)
    if not takers:
        raise ValueError("every drive has a speed of 0: none can take anything")
    while len(takers) > 1:
        # Of equals the last in the order, so that a key that is asked about again stays on the drives that hold it.
        slowest = min(reversed(takers), key=lambda drive: speeds[drive])
        if nbytes * speeds[slowest] / sum(speeds[drive] for drive in takers) >= MIN_PIECE_NBYTES:
            return _cut(nbytes, [(drive, speeds[drive]) for drive in takers])
        takers.remove(slowest)
    return [(min(everyone, key=lambda drive: (held_nbytes[drive] + nbytes) / speeds[drive]), nbytes)]


def _cut(nbytes: int, speeds: Sequence[tuple[int, float]]) -> Shares:
    total = sum(speed for _, speed in speeds)
    shares = []
    start, passed = 0, 0.0
    for number, (drive, speed) in enumerate(speeds, start=1):
        passed += speed
        stop = nbytes if number == len(speeds) else round(nbytes * passed / total / QUANTUM_NBYTES) * QUANTUM_NBYTES
        shares.append((drive, stop - start))
        start = stop
    return shares


def better_split(present: Mapping[int, int], speeds: Sequence[float], held_nbytes: Sequence[int]) -> Shares | None:
    """How a key would be spread if it were written now, when that is clearly better than how it is; else None.

    Args:
        present: bytes of the key by drive, in the order in which they lie there: they keep it.
        speeds, held_nbytes: as in `split`; the key is among what the drives hold.
    """
    order = [*present, *(drive for drive in range(len(speeds)) if drive not in present)]
    nbytes = sum(present.values())
    others = [held - present.get(drive, 0) for drive, held in enumerate(held_nbytes)]
    shares = split(nbytes, speeds, others, order)
    if len(shares) == len(present) == 1:
        # One piece: not the time of this key counts, but the time of all that the drives hold.
        (here,), (there, _) = present, shares[0]
        now_s, then_s = _seconds(held_nbytes[here], speeds[here]), (others[there] + nbytes) / speeds[there]
    else:
        now_s = max(_seconds(part, speeds[drive]) for drive, part in present.items())
        then_s = max(part / speeds[drive] for drive, part in shares)
    return shares if then_s < (1 - _HYSTERESIS) * now_s else None


def part_of(shares: Shares, start: int, stop: int) -> Shares:
    """What bytes `start` to `stop` of a key have of its shares, without parts too small to be worth an operation.

    [Note: keys written in chunks] A chunk goes where a write of its whole key would put it. So a key has its shares
    however it is written, and is read from all drives at once; chunks that were spread one by one, each whole on one
    drive, would leave some keys, or runs of keys, to the slow drives.
    """
    parts: Shares = []
    begins = 0
    for drive, nbytes in shares:
        part = min(stop, begins + nbytes) - max(start, begins)
        if part > 0:
            parts.append((drive, part))
        begins += nbytes
    while len(parts) > 1:
        smallest = min(range(len(parts)), key=lambda number: parts[number][1])
        if parts[smallest][1] >= QUANTUM_NBYTES:
            break
        _, nbytes = parts.pop(smallest)
        beside = max(0, smallest - 1)
        parts[beside] = (parts[beside][0], parts[beside][1] + nbytes)
    return parts


def _seconds(nbytes: int, speed: float) -> float:
    return nbytes / speed if speed > 0 else float("inf")
