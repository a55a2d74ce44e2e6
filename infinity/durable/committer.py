"""Commits finished steps behind the training thread.

    IDLE ──begin──▶ COMMITTING ──▶ IDLE
                        └────────▶ FAILED ──recover──▶ IDLE

One step at a time: the writes of the step land, then one transaction of the store makes them the last generation. No
thread waits for the writes; they take as long as the drives do, and the last one that lands starts the transaction. The
next forward goes on meanwhile, because it only reads. What overwrites stored bytes waits first (`wait`): then the whole
step is committed, or the one before still is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from enum import Enum
from functools import partial

from infinity.errors import InfinityError
from infinity.observe.stalls import StallCause, StallClock
from storage.errors import ClosedError
from storage.manifest import Before
from storage.types import Ticket
from storage.versioned import VersionedStore

_HISTORY = 8


class CommitState(Enum):
    """What the committer is doing."""

    IDLE = "idle"
    COMMITTING = "committing"
    FAILED = "failed"


class _Commit:
    """One step on its way into the store. Its `state` is set by whoever has claimed its end."""

    def __init__(
        self, step: int, epoch: int, notes: Mapping[str, bytes], writes: Sequence[Ticket], before: Before
    ) -> None:
        self.step, self.epoch, self.before = step, epoch, before
        self.notes, self.writes = notes, writes
        self.ticket = Ticket(f"commit of step {step}")
        self.state = CommitState.COMMITTING
        self.is_watched = False  # somebody will end it; written by the training thread
        self._end = threading.Lock()

    @staticmethod
    def none() -> _Commit:
        """What there is before the first one, and in place of one that failed."""
        commit = _Commit(-1, -1, {}, (), Before.FORGET)
        commit.is_watched = True
        commit.end(CommitState.IDLE)
        return commit

    def claim(self) -> bool:
        """Whether the caller is the first who is about to end it."""
        return self._end.acquire(blocking=False)

    def end(self, state: CommitState, error: BaseException | None = None) -> None:
        """It is over. The history keeps what it was made of no longer."""
        self.state, self.notes, self.writes = state, {}, ()
        self.ticket.complete(error)


class Committer:
    """The training thread begins commits, waits for them and recovers; `thread` ends what was begun.

    A commit has begun, or it has not, wherever Ctrl-C comes: it is one append to the history. What a commit that was
    interrupted behind that lacks, the next `wait` makes up for.

    Args:
        store: what is committed.
        thread: has one thread; whoever made it shuts it down, after all writes have ended and before the store closes.
        stalls: measures the waits of the training thread.
        io_timeout_s: longest wait inside the store, in seconds.
        on_failure: told, on any thread, why a step could not be committed.

    Attributes:
        epoch: of the last commit; see `infinity.durable.together`.
        commits: how many steps have been committed.
        seconds: how long that took, from the last write of a step to the end of its transaction.
    """

    def __init__(
        self,
        store: VersionedStore,
        thread: Executor,
        stalls: StallClock,
        *,
        io_timeout_s: float,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.store = store
        self.epoch = -1
        self.commits = 0
        self.seconds = 0.0
        self._thread = thread
        self._stalls = stalls
        self._io_timeout_s = io_timeout_s
        self._on_failure = on_failure
        self._history: deque[_Commit] = deque([_Commit.none()], maxlen=_HISTORY)

    @property
    def state(self) -> CommitState:
        """What it is doing now."""
        return self._history[-1].state

    def begin(
        self,
        step: int,
        notes: Mapping[str, bytes],
        writes: Sequence[Ticket],
        *,
        epoch: int = 0,
        before: Before = Before.FORGET,
    ) -> None:
        """Commit step `step` as soon as its writes have landed. `wait` comes before.

        Args:
            notes: what to note with it, by name.
            writes: of the step; if one of them fails nothing is committed.
            epoch: the collective change of state that it belongs to.
            before: whether the commit before can be gone back to.
        """
        if self.state is not CommitState.IDLE:
            history = ", ".join(f"{commit.ticket.label}: {commit.state.value}" for commit in self._history)
            raise InfinityError(f"step {step} cannot be committed after {history}: a bug of the engine")
        self._history.append(_Commit(step, epoch, notes, list(writes), before))
        self._watch()

    def wait(self) -> None:
        """Wait until no commit is under way. With none, a flag check.

        Raises:
            StorageError: the last one failed.
            IoTimeoutError: nothing moves any more.
        """
        self._watch()
        self._stalls.wait(self._history[-1].ticket, StallCause.COMMIT)

    def settle(self) -> None:
        """Like `wait`, but a commit that failed is as good as one that succeeded."""
        self._watch()
        self._stalls.settle(self._history[-1].ticket, StallCause.COMMIT)

    def recover(self) -> None:
        """A failed commit is forgotten, because its step has been given up."""
        if self.state is CommitState.FAILED:
            self._history.append(_Commit.none())

    # Parts -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """The last write that lands ends the commit. Interrupted and called again, two of them would: one claims it."""
        commit = self._history[-1]
        if not commit.is_watched:
            written = Ticket.all_of(commit.writes, f"writes of step {commit.step}")
            written.add_done_callback(partial(self._landed, commit))
            commit.is_watched = True

    def _landed(self, commit: _Commit, written: Ticket) -> None:
        try:
            self._thread.submit(self._commit, commit, written)
        except RuntimeError as error:  # the thread has been shut down
            if commit.claim():
                self._fail(commit, _ended(commit.step, error))

    def _commit(self, commit: _Commit, written: Ticket) -> None:
        if not commit.claim():
            return
        try:
            written.result()
            started_s = time.perf_counter()
            self.store.commit(commit.step, self._io_timeout_s, notes=commit.notes, before=commit.before)
            self.seconds += time.perf_counter() - started_s
            self.commits += 1
            self.epoch = commit.epoch
        except BaseException as error:
            self._fail(commit, error)
            return
        commit.end(CommitState.IDLE)

    def _fail(self, commit: _Commit, error: BaseException) -> None:
        self._on_failure(error)
        commit.end(CommitState.FAILED, error)


def _ended(step: int, cause: RuntimeError) -> ClosedError:
    error = ClosedError(
        f"step {step} was not committed: the engine was closed before its writes had landed. The last commit is "
        "intact; resume from it"
    )
    error.__cause__ = cause
    return error
