"""Checkpoints on their way to the drive, behind training.

    CAPTURED ──▶ WRITING ──▶ DONE
        └───────────┴──────▶ FAILED

`Saver.begin` takes a captured checkpoint; one thread of its own writes it, oldest first. What lies in swap files is
held there. What lies in host memory only is written before anybody changes it: by that thread, which begins with it, or
by whoever is about to change it (`preserve`). A save that fails never harms a step: its error is kept until the
training thread asks (`raise_failure`, `wait`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from enum import Enum
from functools import partial
from pathlib import Path

from infinity.checkpoint.format import FileEntry
from infinity.checkpoint.pace import Pace
from infinity.checkpoint.part_file import PartFileWriter
from infinity.checkpoint.shard_file import MemorySource, ShardFile
from infinity.errors import CheckpointError, InfinityError
from infinity.observe.stalls import StallCause, StallClock
from storage.copying import RangeCopier
from storage.errors import StorageError
from storage.held import HeldKeys
from storage.types import Ticket

MAX_IN_FLIGHT = 2
_log = logging.getLogger(__name__)


class SaveState(Enum):
    """What becomes of a checkpoint."""

    CAPTURED = "captured"
    WRITING = "writing"
    DONE = "done"
    FAILED = "failed"


_NEXT = {
    SaveState.CAPTURED: {SaveState.WRITING, SaveState.FAILED},
    SaveState.WRITING: {SaveState.DONE, SaveState.FAILED},
    SaveState.DONE: set[SaveState](),
    SaveState.FAILED: set[SaveState](),
}


class _File:
    """A file of shards. Whoever first writes to it lays it out, so the training thread that asks for it does not."""

    def __init__(self, shards: ShardFile, folder: Path) -> None:
        self.shards = shards
        self.runs = shards.stored_runs()
        self._folder = folder
        self._writer: PartFileWriter | None = None
        self._lock = threading.Lock()

    @property
    def writer(self) -> PartFileWriter:
        with self._lock:
            if self._writer is None:
                parts = {part.name: (part.dtype, (part.numel,)) for part in self.shards.parts}
                joined = [run.joined for run in self.runs]
                self._writer = PartFileWriter(self._folder / self.shards.name, parts, joined)
            return self._writer


class _MemoryPart:
    """A part of a file whose bytes are in host memory; written once, by whoever comes first."""

    def __init__(self, file: _File, name: str, memory: memoryview) -> None:
        self._file = file
        self._name = name
        self._memory: memoryview | None = memory
        self._lock = threading.Lock()

    def write(self) -> int:
        """Write it, unless that has been done; how many bytes were written. On return the memory may change."""
        with self._lock:
            memory, self._memory = self._memory, None
            if memory is not None:
                self._file.writer.write(self._name, memory)
            return memory.nbytes if memory is not None else 0

    def give_up(self) -> None:
        """It will not be needed."""
        with self._lock:
            self._memory = None


class CapturedSave:
    """A checkpoint that has been captured and is not written yet.

    Args:
        path: where it will be, for messages.
        folder: where its files are made.
        files: of shards.
        held: what of them lies in swap files; let go when it has been copied.
        finish: told what became of the files; writes what else belongs to the checkpoint, the index last.
        closing: ends the folder: with an exception it removes it, without it puts it in its place. What it holds is
            taken over at last; if something fails before, it stays the caller's.
        begun: a file beside them whose parts have been written; to be finished.
        on_progress: told, on the thread that writes, that something has been written.
    """

    def __init__(
        self,
        path: Path,
        folder: Path,
        files: Sequence[ShardFile],
        held: HeldKeys | None,
        finish: Callable[[Mapping[str, FileEntry]], None],
        closing: ExitStack,
        *,
        begun: PartFileWriter | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = path
        self.ticket = Ticket(f"saving {path}")
        self.copier = RangeCopier()
        self.pace = Pace(self._moved)
        self.progress = 0
        self.preserved_nbytes = 0  # of memory that was written before its change
        self.read_back_nbytes = 0  # of blocks whose digests had to be found
        self._held = held
        self._finish = finish
        self._on_progress = on_progress
        self._state = SaveState.CAPTURED
        self._error: BaseException | None = None
        self._begun = begun
        self._files = [_File(file, folder) for file in files if file.parts]
        if held is not None:
            held.share_with(folder)
        self._memory: dict[str, list[_MemoryPart]] = {}
        for file in self._files:
            for part in file.shards.parts:
                if isinstance(part.source, MemorySource):
                    one = _MemoryPart(file, part.name, part.source.memory)
                    self._memory.setdefault(part.source.key, []).append(one)
        self._closing = closing.pop_all()

    @property
    def state(self) -> SaveState:
        """What has become of it so far."""
        return self._state

    @property
    def held_nbytes(self) -> int:
        """Bytes of the swap files that are held."""
        return self._held.nbytes if self._held is not None and not self.ticket.done else 0

    def preserve(self, key: str) -> None:
        """The memory of `key` is about to change: what this checkpoint needs of it is written now. Raises nothing."""
        for part in self._memory.get(key, ()):
            try:
                self.preserved_nbytes += part.write()
            except OSError as error:
                self._error = self._error or error  # the thread that writes the rest stops at this
                self._give_up_memory()

    def preserve_all(self) -> None:
        """Like `preserve`, of all memory."""
        for key in list(self._memory):
            self.preserve(key)

    def run(self) -> None:
        """Write everything and put the folder in its place.

        Raises:
            CheckpointError: it could not be written; nothing is left of it.
            StorageError: what lies in the swap files could not be read, or is not what was written.
        """
        self._move(SaveState.WRITING)
        try:
            with self._closing:
                try:
                    self._write()
                finally:
                    self._let_go()
        except BaseException as error:
            self._move(SaveState.FAILED)
            self.ticket.set_exception(error)
            raise
        self._move(SaveState.DONE)
        self.ticket.set_done()

    def abandon(self, error: BaseException) -> None:
        """It will not be written: nothing is left of it."""
        try:
            self._let_go()
            self._closing.__exit__(type(error), error, error.__traceback__)
        finally:
            self._move(SaveState.FAILED)
            self.ticket.set_exception(error)

    def _write(self) -> None:
        for parts in self._memory.values():  # first: the sooner it is written the less has to be preserved
            for part in parts:
                self._raise_error()
                part.write()
                self._moved()
        self.pace.begin()
        entries: dict[str, FileEntry] = {}
        shared = [file.writer for file in self._files if not self._copy(file, entries)]
        self._let_go()  # what is shared stays as it is in the checkpoint's own files
        for writer in shared:
            writer.read_back(self.pace)
            self._end(writer, entries)
        if self._begun is not None:
            self._end(self._begun, entries)
        self._raise_error()
        self._finish(entries)

    def _copy(self, file: _File, entries: dict[str, FileEntry]) -> bool:
        """Get a file's bytes from the swap files; if they had to be copied it is ended too, and whether it is."""
        is_shared = True
        for run in file.runs:
            self._raise_error()
            if self._held is not None:
                place = (self._held, run.source.key, run.source.offset)
                is_shared &= file.writer.copy(run.joined.names[0], *place, self.copier, self.pace)
                self._moved()
        if not is_shared:
            file.writer.read_back(self.pace)
            self._end(file.writer, entries)
        return not is_shared

    def _end(self, writer: PartFileWriter, entries: dict[str, FileEntry]) -> None:
        self._raise_error()
        entries[writer.path.name] = writer.finish()
        self.read_back_nbytes += writer.read_back_nbytes
        self.pace.rest()

    def note_progress(self) -> None:
        """What it waits for has moved: nobody takes it for stuck."""
        self.progress += 1

    def _moved(self) -> None:
        self.progress += 1
        self._on_progress()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.close()
        self._give_up_memory()

    def _give_up_memory(self) -> None:
        for parts in self._memory.values():
            for part in parts:
                part.give_up()

    def _move(self, to: SaveState) -> None:
        if to not in _NEXT[self._state]:
            raise InfinityError(f"the save of {self.path} cannot become {to.value} after {self._state.value}: a bug")
        self._state = to


class Saver:
    """The saves of one engine. `preserve` may be called by any thread, the rest by the training thread.

    Args:
        thread: has one thread; whoever made it shuts it down, before the store of the engine closes.
        stalls: measures the waits of the training thread.
    """

    def __init__(self, thread: Executor, stalls: StallClock) -> None:
        self._thread = thread
        self._stalls = stalls
        self._saves: list[CapturedSave] = []  # not over; replaced, never changed
        self._ended_progress = 0
        self._failure: BaseException | None = None
        self.completed = 0

    @property
    def progress(self) -> int:
        """Grows with everything that is written."""
        return self._ended_progress + sum(save.progress for save in self._saves)

    @property
    def held_nbytes(self) -> int:
        """Bytes of the swap files that saves hold."""
        return sum(save.held_nbytes for save in self._saves)

    def preserve(self, key: str) -> None:
        """The host memory of a shard or of a record is about to change. Without saves under way a flag check."""
        for save in self._saves:
            save.preserve(key)

    def preserve_all(self) -> None:
        """All host memory may be about to change."""
        for save in self._saves:
            save.preserve_all()

    def make_room(self, path: Path) -> None:
        """Before another save: wait until there are few enough, and none to the same place."""
        self._reap()
        for save in list(self._saves):
            if len(self._saves) >= MAX_IN_FLIGHT or save.path == path:
                self._await(save)
                self._reap()

    def write(self, save: CapturedSave) -> None:
        """Write a checkpoint now, behind those that were begun before. Raises what `CapturedSave.run` does."""
        try:
            for earlier in self._saves:
                self._await(earlier)
        except BaseException as error:
            save.abandon(error)
            raise
        save.pace.hurry()
        with self._stalls.charged(StallCause.SAVE):
            save.run()
        self.completed += 1

    def begin(self, save: CapturedSave) -> None:
        """Write a checkpoint behind training."""
        self._saves = [*self._saves, save]
        self._thread.submit(partial(_run, save))

    def raise_failure(self) -> None:
        """Raise, once, what kept a save from being written.

        Raises:
            CheckpointError, StorageError: as `CapturedSave.run`.
        """
        if self._saves or self._failure is not None:
            self._reap()
            error, self._failure = self._failure, None
            if error is not None:
                raise error

    def wait(self) -> None:
        """Wait until every save is over, and raise what went wrong with one.

        Raises:
            CheckpointError, StorageError: as `CapturedSave.run`.
            IoTimeoutError: nothing moves any more.
        """
        self.settle()
        self.raise_failure()

    def settle(self) -> None:
        """Like `wait`, but a save that failed is as good as one that succeeded, and told later."""
        for save in reversed(self._saves):  # so that none of them rests any more before the first is over
            self._await(save)
        self._reap()

    def _await(self, save: CapturedSave) -> None:
        """Wait until a save is over, well or not. Those before it are in its way: they hurry too."""
        for earlier in self._saves[: self._saves.index(save) + 1]:
            earlier.pace.hurry()
        self._stalls.settle(save.ticket, StallCause.SAVE)

    def _reap(self) -> None:
        over = [save for save in self._saves if save.ticket.done]
        self._saves = [save for save in self._saves if save not in over]
        for save in over:
            self._ended_progress += save.progress
            if save.ticket.exception is None:
                self.completed += 1
            elif self._failure is None:
                self._failure = _told(save)
            else:
                _log.error("%s. It is told here because another save has failed too", _told(save))


def _run(save: CapturedSave) -> None:
    try:
        save.run()
    except BaseException:  # the ticket carries it to the training thread
        return


def _told(save: CapturedSave) -> BaseException:
    """What the training thread raises for a save that failed behind it."""
    error = save.ticket.exception
    if isinstance(error, CheckpointError | StorageError):
        return error
    failure = CheckpointError(f"the checkpoint {save.path} could not be written: {error!r}")
    failure.__cause__ = error
    return failure
