"""Checksums of a key's bytes: xxh3 per block, noted when written, verified when read.

A key is cut into blocks of `BLOCK_NBYTES` at fixed offsets, each with one digest. Where a write covers only part of a
block, the block is split into the spans that were written, each with its own digest. An operation that cuts through a
span has to know the rest of it: the store reads the span back, so that what is left of it stays guarded (`Cut`). A
program that always uses the same parts of a key never pays for that twice.

Which spans there are is decided when an operation is submitted, in the order of submission; the digests are computed
when its bytes move, in the threads that move them. An operation therefore reaches as far as the spans it cuts, and
operations whose reaches overlap run one after the other (see `ordering`). Whoever has just made the bytes of a write
may bring their digests along (`Digests`): the threads that move bytes have less to do then, and what changes them on
their way to the drive is noticed as well.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import pairwise

import xxhash

from storage.errors import IntegrityError
from storage.types import Op

# Small enough that reading a cut block back costs little, large enough that Python's part in hashing (about a
# microsecond per block, GIL held) is some percent, and that xxhash lets go of the GIL for the rest.
BLOCK_NBYTES = 256 << 10
READ_BACK_KIND = "checksum"  # the traffic tag of what is read only to judge a checksum; none of it is payload


class Checksum(StrEnum):
    """Which checksum guards the stored bytes."""

    XXH3 = "xxh3"
    NONE = "none"


class BlockState(IntEnum):
    """What is known about a block."""

    UNWRITTEN = 0
    WHOLE = 1
    SPLIT = 2


def block_parts(start: int, stop: int) -> list[tuple[int, int]]:
    """What bytes `start` to `stop` of a key are of each block that they touch, in order."""
    cuts = [start, *range((start // BLOCK_NBYTES + 1) * BLOCK_NBYTES, stop, BLOCK_NBYTES), stop]
    return list(pairwise(cuts))


def xxh3_of(memory: memoryview) -> int:
    """The xxh3 of bytes. Does not hold the GIL meanwhile."""
    return xxhash.xxh3_64_intdigest(memory)


@dataclass(frozen=True, slots=True)
class Digests:
    """What a write will note, computed before it was submitted.

    Attributes:
        start, stop: the bytes of the key that are written.
        values: the digest of each of their `block_parts`.

    Raises:
        ValueError: there are more or fewer digests than parts.
    """

    start: int
    stop: int
    values: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.values) != (expected := len(block_parts(self.start, self.stop))):
            raise ValueError(f"{len(self.values)} digests for bytes {self.start} to {self.stop}: {expected} are needed")

    @classmethod
    def of(cls, memory: memoryview, start: int) -> Digests:
        """Of bytes that will be written to a key from `start` on."""
        stop = start + len(memory)
        return cls(start, stop, [xxh3_of(memory[a - start : b - start]) for a, b in block_parts(start, stop)])


@dataclass(slots=True, eq=False)
class Span:
    """Bytes `start` to `stop` of a key that were written at once, inside one block.

    Attributes:
        digest: None until they have been written.
        error: why what the disk holds is known to be wrong, if it is.
    """

    start: int
    stop: int
    digest: int | None = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class Cut:
    """A span that an operation covers only in part. `leftovers` is what a write leaves of it."""

    span: Span
    number: int | None  # of the block, when the span is a whole one: its digest is known once earlier writes have ended
    leftovers: list[Span] = field(default_factory=list)


class KeyChecksums:
    """The digests of one key. `plan` is guarded by the store's lock, the rest by the order of operations."""

    def __init__(self, key: str, nbytes: int) -> None:
        self.key = key
        self.nbytes = nbytes
        self.generation = 0  # counts writes
        count = -(-nbytes // BLOCK_NBYTES)
        self.digests = array("Q", bytes(8 * count))
        self.states = bytearray(count)
        self.spans: dict[int, list[Span]] = {}  # of split blocks, by offset

    def dump(self) -> tuple[bytes, bytes, str]:
        """Digests, states and spans, to be stored; nothing is in flight."""
        spans = {
            number: [(one.start, one.stop, one.digest, one.error is not None) for one in block]
            for number, block in self.spans.items()
        }
        return self.digests.tobytes(), bytes(self.states), json.dumps(spans) if spans else ""

    def restore(self, digests: bytes, states: bytes, spans: str) -> None:
        """Take over what `dump` gave.

        Raises:
            ValueError, TypeError: it is of another key.
        """
        if (len(digests), len(states)) != (8 * len(self.digests), len(self.states)):
            raise ValueError(f"checksums of {len(states)} blocks for {self.key!r}, which has {len(self.states)}")
        self.digests = array("Q", digests)
        self.states = bytearray(states)
        for number, block in json.loads(spans or "{}").items():
            self.spans[int(number)] = [Span(a, b, digest, self._old_damage(a, b, bad)) for a, b, digest, bad in block]

    def _old_damage(self, start: int, stop: int, is_damaged: bool) -> IntegrityError | None:
        message = f"bytes {start} to {stop} of {self.key!r} were found damaged before they were committed"
        return IntegrityError(message, nbytes=stop - start, key=self.key) if is_damaged else None

    def bounds(self, number: int) -> tuple[int, int]:
        """Where a block starts and stops in the key."""
        start = number * BLOCK_NBYTES
        return start, min(start + BLOCK_NBYTES, self.nbytes)

    def plan(self, op: Op, start: int, memory: memoryview, digests: Digests | None = None) -> Check:
        """Note that an operation was submitted; what it has to do when it runs. `digests` are of a write."""
        stop = start + len(memory)
        check = Check(self, op, start, memory, digests)
        first, last = start // BLOCK_NBYTES, (stop - 1) // BLOCK_NBYTES
        if op is Op.WRITE:
            self.generation += 1
            for number in sorted({first, last}):
                self._plan_write(check, number)
            for number in [one for one in self.spans if first < one < last] if self.spans else []:
                del self.spans[number]
            if last - first > 1:
                self.states[first + 1 : last] = bytes([BlockState.WHOLE]) * (last - first - 1)
        else:
            check.states = bytes(self.states[first : last + 1])
            for number in sorted({first, last}):
                check.cuts += self._cuts(number, start, stop)
            if self.spans:
                check.spans = {n: list(self.spans[n]) for n in range(first, last + 1) if n in self.spans}
        check.generation = self.generation
        check.reach_start = min([start, *(cut.span.start for cut in check.cuts)])
        check.reach_stop = max([stop, *(cut.span.stop for cut in check.cuts)])
        return check

    def _cuts(self, number: int, start: int, stop: int) -> list[Cut]:
        """The spans of a block of which bytes `start` to `stop` are a part, but not all."""
        block_start, block_stop = self.bounds(number)
        if self.states[number] == BlockState.WHOLE:
            is_inside = start <= block_start and block_stop <= stop
            return [] if is_inside else [Cut(Span(block_start, block_stop), number)]
        return [
            Cut(span, None)
            for span in self.spans.get(number, ())
            if span.start < stop and start < span.stop and (span.start < start or stop < span.stop)
        ]

    def _plan_write(self, check: Check, number: int) -> None:
        start, stop = check.start, check.stop
        block_start, block_stop = self.bounds(number)
        cuts = self._cuts(number, start, stop)
        if start <= block_start and block_stop <= stop:
            self.states[number] = BlockState.WHOLE
            self.spans.pop(number, None)
            return
        spans = [span for span in self.spans.get(number, ()) if span.stop <= start or stop <= span.start]
        for cut in cuts:
            sides = ((cut.span.start, min(cut.span.stop, start)), (max(cut.span.start, stop), cut.span.stop))
            cut.leftovers = [Span(a, b) for a, b in sides if a < b]
            spans += cut.leftovers
        written = Span(max(start, block_start), min(stop, block_stop))
        check.spans[number] = [written]
        self.spans[number] = sorted([*spans, written], key=lambda span: span.start)
        self.states[number] = BlockState.SPLIT
        check.cuts += cuts


class Check:
    """What one operation has to note or verify. `moved` and `settle` are called by the threads that do the I/O.

    Attributes:
        reach_start, reach_stop: the operation's bytes, and the spans it cuts.
        cuts: spans to read back: by a write before it starts, by a read beside it.
    """

    def __init__(
        self, owner: KeyChecksums, op: Op, start: int, memory: memoryview, digests: Digests | None = None
    ) -> None:
        self.op = op
        self.start = start
        self.stop = start + len(memory)
        self.reach_start, self.reach_stop = self.start, self.stop
        self.cuts: list[Cut] = []
        self.spans: dict[int, list[Span]] = {}
        self.states = b""
        self.generation = 0
        self._owner = owner
        self._memory = memory
        self._digests = digests
        self._missing: dict[int, int] = {}  # bytes of a block that are still to move, of blocks that move in parts
        self._lock = threading.Lock()

    @property
    def read_back_nbytes(self) -> int:
        return sum(cut.span.stop - cut.span.start for cut in self.cuts)

    def moved(self, start: int, stop: int, place: Place) -> None:
        """Bytes `start` to `stop` of the key have moved.

        Raises:
            IntegrityError: what was read is not what was written.
        """
        for number in range(start // BLOCK_NBYTES, -(-stop // BLOCK_NBYTES)):
            block_start, block_stop = self._owner.bounds(number)
            if self.op is Op.WRITE:
                # What is written does not change meanwhile, so one of a block's parts can speak for all of it: the
                # first. Parts may move twice, when a write that failed is repeated on another drive.
                if start <= max(block_start, self.start):
                    self._note(number)
                continue
            is_whole = start <= block_start and block_stop <= stop
            part_nbytes = min(stop, block_stop) - max(start, block_start)
            if is_whole or self._is_last_part(number, part_nbytes):
                self._verify(number, place)

    def settle(self, cut: Cut, content: memoryview, place: Place) -> None:
        """A cut span was read back.

        Raises:
            IntegrityError: of a read: the span is not what was written. (A write does not depend on it; whoever reads
                what is left of the span will be told.)
        """
        span = cut.span
        if span.error is not None:
            self.give_up(cut, span.error)
            return
        digest = span.digest if cut.number is None else self._owner.digests[cut.number]
        if digest is None:
            return  # its write failed, which the store knows
        hasher = xxhash.xxh3_64()
        if self.op is Op.READ:
            # What is judged are the bytes that the reader gets, not those that were read beside them.
            start, stop = max(span.start, self.start), min(span.stop, self.stop)
            hasher.update(content[: start - span.start])
            hasher.update(self._memory[start - self.start : stop - self.start])
            hasher.update(content[stop - span.start :])
        else:
            hasher.update(content)
        if hasher.intdigest() != digest:
            self.give_up(cut, self._mismatch(span.start, span.stop, place))
            return
        for left in cut.leftovers:
            left.digest = xxh3_of(content[left.start - span.start : left.stop - span.start])

    def give_up(self, cut: Cut, error: BaseException) -> None:
        """A cut span cannot be trusted, or not be read back: raised now, or to those who read what is left of it."""
        if self.op is Op.READ:
            raise error
        for left in cut.leftovers:
            left.error = error

    def _is_last_part(self, number: int, nbytes: int) -> bool:
        block_start, block_stop = self._owner.bounds(number)
        with self._lock:
            missing = self._missing.get(number, min(self.stop, block_stop) - max(self.start, block_start)) - nbytes
            self._missing[number] = missing
        return not missing

    def _hash(self, start: int, stop: int) -> int:
        return xxh3_of(self._memory[start - self.start : stop - self.start])

    def _note(self, number: int) -> None:
        spans = self.spans.get(number)
        if spans is None:
            self._owner.digests[number] = self._digest_of(number, *self._owner.bounds(number))
            return
        for span in spans:
            span.digest = self._digest_of(number, span.start, span.stop)

    def _digest_of(self, number: int, start: int, stop: int) -> int:
        """Of what is written of a block."""
        if self._digests is None:
            return self._hash(start, stop)
        return self._digests.values[number - self.start // BLOCK_NBYTES]

    def _verify(self, number: int, place: Place) -> None:
        state = self.states[number - self.start // BLOCK_NBYTES]
        start, stop = self._owner.bounds(number)
        if state == BlockState.WHOLE and self.start <= start and stop <= self.stop:
            if self._hash(start, stop) != self._owner.digests[number]:
                raise self._mismatch(start, stop, place)
        elif state == BlockState.SPLIT:
            for span in self.spans[number]:
                if self.start <= span.start and span.stop <= self.stop:
                    self._verify_span(span, place)

    def _verify_span(self, span: Span, place: Place) -> None:
        if span.error is not None:
            raise span.error
        if span.digest is not None and self._hash(span.start, span.stop) != span.digest:
            raise self._mismatch(span.start, span.stop, place)

    def _mismatch(self, start: int, stop: int, place: Place) -> IntegrityError:
        offset = place.offset + max(0, start - place.start)
        key = self._owner.key
        return IntegrityError(
            f"{stop - start} bytes at {start} of {key!r} (generation {self.generation}), read at offset {offset} of "
            f"{place.path}, are not what was written: the checksums differ. Nothing was changed: the file still holds "
            "these bytes, and the memory of the read what was read. Check the drive and the memory of this machine",
            path=place.path,
            offset=offset,
            nbytes=stop - start,
            key=key,
            generation=self.generation,
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where bytes of a key are stored: byte `start` of it lies at `offset` of a file."""

    path: str
    offset: int
    start: int


@dataclass(frozen=True, slots=True)
class RequestCheck:
    """The check of one request of an operation; called with parts of the request's memory that have moved."""

    check: Check
    place: Place

    def __call__(self, start: int, stop: int) -> None:
        self.check.moved(self.place.start + start, self.place.start + stop, self.place)
