"""Commits finished steps behind the training thread.

    IDLE ──begin──▶ COMMITTING ──▶ IDLE
                        └────────▶ FAILED ──recover──▶ IDLE

One step at a time: the writes of the step land, then one transaction of the store makes them the last generation. No
thread waits for the writes; they take as long as the drives do, and the last one that lands starts the transaction. The
next forward goes on meanwhile, because it only reads. What overwrites stored bytes, or memory that is being written,
waits first (`wait`): then the whole step is committed, or the one before still is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from enum import Enum

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


class Committer:
    """The training thread begins commits, waits for them and recovers; `thread` ends what was begun.

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
        self._ticket = Ticket.completed("commit")
        self._state = CommitState.IDLE
        self._history: deque[CommitState] = deque([CommitState.IDLE], maxlen=_HISTORY)

    @property
    def state(self) -> CommitState:
        """What it is doing now."""
        return self._state

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
        self._move(CommitState.COMMITTING, CommitState.IDLE)
        self._ticket = ticket = Ticket(f"commit of step {step}")

        def landed(written: Ticket) -> None:
            try:
                self._thread.submit(self._commit, (step, epoch), notes, written, before, ticket)
            except RuntimeError as error:  # the thread has been shut down
                self._fail(ticket, _ended(step, error))

        Ticket.all_of(writes, f"writes of step {step}").add_done_callback(landed)

    def wait(self) -> None:
        """Wait until no commit is under way. With none, a flag check.

        Raises:
            StorageError: the last one failed.
            IoTimeoutError: nothing moves any more.
        """
        self._stalls.wait(self._ticket, StallCause.COMMIT)

    def settle(self) -> None:
        """Like `wait`, but a commit that failed is as good as one that succeeded."""
        self._stalls.settle(self._ticket, StallCause.COMMIT)

    def recover(self) -> None:
        """A failed commit is forgotten, because its step has been given up."""
        if self._state is CommitState.FAILED:
            self._move(CommitState.IDLE, CommitState.FAILED)
            self._ticket = Ticket.completed("commit")

    def _commit(
        self,
        what: tuple[int, int],
        notes: Mapping[str, bytes],
        written: Ticket,
        before: Before,
        ticket: Ticket,
    ) -> None:
        step, epoch = what
        try:
            written.result()
            started_s = time.perf_counter()
            self.store.commit(step, self._io_timeout_s, notes=notes, before=before)
            self.seconds += time.perf_counter() - started_s
            self.commits += 1
            self.epoch = epoch
        except BaseException as error:
            self._fail(ticket, error)
            return
        self._move(CommitState.IDLE, CommitState.COMMITTING)
        ticket.set_done()

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        self._move(CommitState.FAILED, CommitState.COMMITTING)
        self._on_failure(error)
        ticket.set_exception(error)

    def _move(self, to: CommitState, origin: CommitState) -> None:
        if self._state is not origin:
            history = " → ".join(state.value for state in self._history)
            raise InfinityError(f"the committer cannot become {to.value} after {history}: a bug of the engine")
        self._state = to
        self._history.append(to)


def _ended(step: int, cause: RuntimeError) -> ClosedError:
    error = ClosedError(
        f"step {step} was not committed: the engine was closed before its writes had landed. The last commit is "
        "intact; resume from it"
    )
    error.__cause__ = cause
    return error
