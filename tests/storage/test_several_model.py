"""A store over several drives as a state machine: speeds change, drives fail and get full, and bytes stay right."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from storage.backends.faulty import Fault
from storage.errors import StorageError
from storage.health import DEFAULT_RETRY_FULL_S
from storage.pool import HostPool, Lease
from storage.types import Op, Ticket
from tests.storage.helpers import MIB, PAGE, TAG, WAIT_S, filled, pattern
from tests.storage.several import SeveralDrives

_KEYS = ("a", "b", "c")
_SIZES = st.sampled_from([70, 1, 3 * MIB // PAGE, 5 * MIB // PAGE + 1])  # pages: small keys, and such as are cut
_SPEEDS = st.sampled_from([10, 20, 40, 200])
_MOST_IN_FLIGHT = 12
_FAULTS = st.sampled_from([Fault.IO_ERROR, Fault.NO_SPACE, Fault.SHORT])


class SeveralMachine(RuleBasedStateMachine):
    """`content` is what the keys hold by page, as if each operation ended before the next began; None where lost."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.pool = HostPool(256 << 20)
        self.content: dict[str, list[bytes | None]] = {}
        self.turn = 0
        self.writes: list[tuple[Ticket, Lease]] = []
        self.reads: list[tuple[Ticket, Lease, list[bytes | None]]] = []
        self.broken: set[int] = set()

    @initialize(drives=st.sampled_from([2, 3, 1]), checksum=st.sampled_from(["xxh3", "none"]))
    def begin(self, drives: int, checksum: str) -> None:
        self.several = SeveralDrives(Path(self.folder.name), drives, checksum=checksum)
        self.drives = drives
        for key, pages in (("a", 5 * MIB // PAGE + 1), ("b", 70)):
            self.create(key, pages)

    @precondition(lambda self: len(self.content) < len(_KEYS))
    @rule(key=st.sampled_from(_KEYS), pages=_SIZES)
    def create(self, key: str, pages: int) -> None:
        if key not in self.content:
            self.several.store.create(key, pages * PAGE)
            self.content[key] = [None] * pages
            self.write_span(key, 0, pages)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        key, first, pages = self.draw_span(data)
        self.write_span(key, first, pages)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def write_all(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.content)))
        self.write_span(key, 0, len(self.content[key]))

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        self.read_span(*self.draw_span(data))
        if len(self.writes) + len(self.reads) > _MOST_IN_FLIGHT:
            self.settle()

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        self.settle()
        key = data.draw(st.sampled_from(sorted(self.content)))
        self.several.store.delete(key)
        del self.content[key]

    @rule(data=st.data())
    def speeds_change(self, data: st.DataObject) -> None:
        """And everything is written again, as in training, in whole or in chunks."""
        self.settle()
        self.several.are_measured(*(data.draw(_SPEEDS) for _ in range(self.drives)))
        chunk = data.draw(st.sampled_from([2 * MIB // PAGE, 1 << 20]))
        for key, pages in self.content.items():
            for first in range(0, len(pages), chunk):
                self.write_span(key, first, min(chunk, len(pages) - first))

    @rule(data=st.data(), fault=_FAULTS)
    def a_drive_refuses(self, data: st.DataObject, fault: Fault) -> None:
        """Never all of them: then every write finds a place."""
        self.settle()
        drive = data.draw(st.integers(0, self.drives - 1))
        if len(self.broken | {drive}) < self.drives:
            self.broken.add(drive)
            self.several.faults[drive].inject(fault, op=Op.WRITE, times=None)
        for key, pages in self.content.items():
            self.write_span(key, 0, len(pages))
            self.read_span(key, 0, len(pages))
            self.write_span(key, len(pages) // 3, 1)
            if data.draw(st.booleans()):
                self.settle()  # so that the next key finds the drive known as broken

    @precondition(lambda self: self.content)
    @rule(data=st.data(), fault=_FAULTS)
    def every_drive_refuses(self, data: st.DataObject, fault: Fault) -> None:
        self.settle()
        key, first, pages = self.draw_span(data)
        for one in self.several.faults:
            one.inject(fault, op=Op.WRITE, times=None)
        with filled(self.pool, pages * PAGE, 0) as lease:
            ticket = self.several.store.submit_write(key, lease.memory, offset=first * PAGE, tag=TAG)
            assert ticket.wait(WAIT_S)
            assert isinstance(ticket.exception, StorageError)
        self.content[key][first : first + pages] = [None] * pages
        self.drives_recover()

    @precondition(lambda self: self.broken)
    @rule()
    def drives_recover(self) -> None:
        self.settle()
        for one in self.several.faults:
            one.clear()
        self.broken.clear()
        self.several.clock.sleep(DEFAULT_RETRY_FULL_S)

    def settle(self) -> None:
        """Everything in flight ends; then nothing is leaked, shared, or wrong."""
        assert self.several.store.drain(WAIT_S)
        for ticket, lease in self.writes:
            assert ticket.exception is None
            lease.release()
        for ticket, lease, expected in self.reads:
            if None in expected:
                assert isinstance(ticket.exception, StorageError)
            else:
                assert ticket.exception is None
                assert lease.memory == b"".join(page for page in expected if page is not None)
            lease.release()
        self.writes, self.reads = [], []
        self.several.check_extents()

    @invariant()
    def keys_are_there(self) -> None:
        if hasattr(self, "several"):
            assert sorted(self.several.store.keys()) == sorted(self.content)

    def draw_span(self, data: st.DataObject) -> tuple[str, int, int]:
        key = data.draw(st.sampled_from(sorted(self.content)))
        count = len(self.content[key])
        first = data.draw(st.integers(0, count - 1))
        return key, first, data.draw(st.integers(1, count - first))

    def read_span(self, key: str, first: int, pages: int) -> None:
        lease = self.pool.lease(pages * PAGE, "read")
        ticket = self.several.store.submit_read(key, lease.memory, offset=first * PAGE, tag=TAG)
        self.reads.append((ticket, lease, self.content[key][first : first + pages]))

    def write_span(self, key: str, first: int, pages: int) -> None:
        self.turn += 1
        lease = filled(self.pool, pages * PAGE, self.turn)
        ticket = self.several.store.submit_write(key, lease.memory, offset=first * PAGE, tag=TAG)
        self.writes.append((ticket, lease))
        data = pattern(pages * PAGE, self.turn).tobytes()
        self.content[key][first : first + pages] = [data[n * PAGE : (n + 1) * PAGE] for n in range(pages)]
        if len(self.writes) + len(self.reads) > _MOST_IN_FLIGHT:
            self.settle()

    def teardown(self) -> None:
        if hasattr(self, "several"):
            self.settle()
            for key in sorted(self.content):
                with self.pool.lease(len(self.content[key]) * PAGE, key) as lease:
                    ticket = self.several.store.submit_read(key, lease.memory, tag=TAG)
                    assert ticket.wait(WAIT_S)
                    if None not in self.content[key]:
                        assert ticket.exception is None
                        assert lease.memory == b"".join(page for page in self.content[key] if page is not None)
                self.several.store.delete(key)
            assert all(report.held_nbytes == 0 for report in self.several.store.drive_report())
            self.several.store.close()
        self.pool.close(strict=True)
        self.folder.cleanup()


SeveralMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
TestSeveralMachine = SeveralMachine.TestCase
