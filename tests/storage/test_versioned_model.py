"""A versioned store as a state machine: random writes, commits and crashes against plain bytes."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from storage.backends.faulty import Fault, FaultyBackend
from storage.errors import StorageError
from storage.pool import HostPool
from storage.types import Op
from tests.storage.helpers import MIB, PAGE, TAG, failure, filled
from tests.storage.versions import change_speeds, check_extents, get, open_versioned, put

_KEYS = st.sampled_from(["a", "b", "c"])
_PAGES = 70  # more than one block of checksums
_SIZES = st.one_of(st.integers(1, _PAGES), st.just(5 * MIB // PAGE + 1))  # and one that is cut into pieces
_SPEEDS = st.sampled_from([10, 20, 40, 200])

Content = dict[str, list[bytes | None]]


class VersionedMachine(RuleBasedStateMachine):
    """`content` is what the store holds by page (None: never written), `committed` what a crash goes back to."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.pool = HostPool(256 << 20)
        self.content: Content = {}
        self.committed: Content = {}
        self.failed: set[str] = set()
        self.turn = 0
        self.generation = 0
        self.refusing = False

    @initialize(drives=st.integers(1, 3))
    def begin(self, drives: int) -> None:
        self.drives = drives
        self.open()

    def open(self) -> None:
        self.faults: list[FaultyBackend] = []

        def wrap(backend: object) -> FaultyBackend:
            self.faults.append(FaultyBackend(backend))  # type: ignore[arg-type]
            return self.faults[-1]

        self.refusing = False
        self.store = open_versioned(Path(self.folder.name), drives=self.drives, capacity_nbytes=0, wrap_backend=wrap)

    @rule(key=_KEYS, pages=_SIZES)
    def create(self, key: str, pages: int) -> None:
        if key not in self.content:
            self.store.create(key, pages * PAGE, "float32")
            self.content[key] = [None] * pages

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        key, first, pages = self.draw_span(data)
        self.turn += 1
        written = put(self.store, self.pool, key, self.turn, pages, first)
        self.content[key][first : first + pages] = [written[i * PAGE : (i + 1) * PAGE] for i in range(pages)]
        if pages == len(self.content[key]):
            self.failed.discard(key)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def speeds_change(self, data: st.DataObject) -> None:
        """And keys are written again, as in training, in whole or in chunks: that is when they move."""
        change_speeds(self.store, *(data.draw(_SPEEDS) for _ in range(self.drives)))
        self.write_all(data.draw(st.sampled_from([2 * MIB // PAGE, 1 << 20])))

    def write_all(self, chunk: int) -> None:
        self.turn += 1
        for key, pages in self.content.items():
            for first in range(0, len(pages), chunk):
                count = min(chunk, len(pages) - first)
                written = put(self.store, self.pool, key, self.turn + first, count, first)
                pages[first : first + count] = [written[i * PAGE : (i + 1) * PAGE] for i in range(count)]
            self.failed.discard(key)

    @precondition(lambda self: self.content and self.drives > 1)
    @rule(data=st.data(), fault=st.sampled_from([Fault.IO_ERROR, Fault.NO_SPACE]))
    def a_drive_refuses(self, data: st.DataObject, fault: Fault) -> None:
        """For good until the store is opened again; the others take its part."""
        if not self.refusing:
            self.refusing = True
            self.faults[data.draw(st.integers(0, self.drives - 1))].inject(fault, op=Op.WRITE, times=None)
        self.write_all(1 << 20)

    @precondition(lambda self: self.content and not self.refusing)
    @rule(data=st.data())
    def write_that_fails(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.content)))
        pages = len(self.content[key])
        injections = [one.inject(Fault.IO_ERROR, op=Op.WRITE, times=None) for one in self.faults]
        with filled(self.pool, pages * PAGE, 0) as lease:
            failure(self.store.submit_write(key, lease.memory, tag=TAG))
        assert any(one.hits for one in injections)
        for one in self.faults:
            one.clear()
        self.failed.add(key)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.content)))
        self.store.delete(key)
        del self.content[key]
        self.failed.discard(key)

    @rule()
    def commit(self) -> None:
        if self.failed:
            try:
                self.store.commit(self.turn)
            except StorageError as error:
                assert "cannot be committed" in str(error)
                return
            raise AssertionError("bytes that were lost were committed")
        self.generation += 1
        assert self.store.commit(self.turn) == self.generation
        self.committed = {key: list(pages) for key, pages in self.content.items()}
        total = sum(len(pages) * PAGE for pages in self.content.values())
        assert total == sum(n for drive in self.store._drives for _, n in drive.file.extents.used())

    @rule()
    def crash(self) -> None:
        self.store.close()
        self.open()
        assert self.store.generation == self.generation
        self.content = {key: list(pages) for key, pages in self.committed.items()}
        self.failed.clear()

    @invariant()
    def holds_what_was_written(self) -> None:
        if not hasattr(self, "store"):
            return
        assert sorted(self.store.keys()) == sorted(self.content)
        check_extents(self.store)
        for key in sorted(self.content.keys() - self.failed):
            found = get(self.store, self.pool, key)
            for number, page in enumerate(self.content[key]):
                assert page is None or found[number * PAGE : (number + 1) * PAGE] == page

    def draw_span(self, data: st.DataObject) -> tuple[str, int, int]:
        key = data.draw(st.sampled_from(sorted(self.content)))
        count = len(self.content[key])
        if key in self.failed:
            return key, 0, count
        first = data.draw(st.integers(0, count - 1))
        return key, first, data.draw(st.integers(1, count - first))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        self.pool.close(strict=True)
        self.folder.cleanup()


VersionedMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
TestVersionedMachine = VersionedMachine.TestCase
