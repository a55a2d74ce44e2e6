"""Whether all parameters and their optimizer state belong to the same step.

An update that fails, a load that stops half-way or an iteration that raises after some parameters were updated leaves
two steps mixed. From then on everything that would use the mixture is refused, until a complete state replaces it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from infinity.errors import IterationError
from infinity.runtime import Runtime
from storage.errors import detached

_LOAD_ANOTHER = (
    "some parameters are the new ones and others are not. Load a complete checkpoint, or close this engine and start "
    "again"
)


class Consistency:
    """Remembers why the state is mixed, if it is. Written by the training thread.

    What fails on the I/O loop is noted in `Runtime.failure`, and taken over here when the training thread comes by.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._reason: str | None = None  # why the state is mixed, and what to do

    def check(self) -> None:
        """Raise what failed behind the training thread, once as itself and from then on as a lost state.

        Raises:
            IterationError: an update was lost; the parameters belong to two different steps.
        """
        failure = self._runtime.failure.error
        if self._reason is not None:
            raise IterationError(self._reason) from failure
        if failure is not None:
            self.lose_step(failure)
            raise detached(failure)

    def notice_failure(self) -> None:
        """An iteration failed. If that was a lost update, which it has raised, the state is lost from now on."""
        failure = self._runtime.failure.error
        if failure is not None and self._reason is None:
            self.lose_step(failure)

    def lose_step(self, error: BaseException) -> None:
        """The running step was applied in part, and cannot be finished because of `error`."""
        self._runtime.failure.note(error)
        committer = self._runtime.committer
        way_out = (
            "When the cause is gone, engine.load() a checkpoint; or close this engine and start again from the last "
            "saved state"
        )
        if committer is not None:
            way_out = f"When the cause is gone, engine.restore() goes back to step {committer.store.step}"
        self._reason = (
            f"step {self._runtime.step} was lost half-way ({type(error).__name__}: {error}); some parameters are "
            f"updated and others are not. {way_out}"
        )

    @property
    def is_lost(self) -> bool:
        """Whether the state is mixed, and that has been raised."""
        return self._reason is not None

    @contextmanager
    def applying(self) -> Iterator[None]:
        """Updates of the running step are made in this block: left by an exception, some are made and others not."""
        try:
            yield
        except BaseException as error:
            self.lose_step(error)
            raise

    @contextmanager
    def replacing(self, what: str) -> Iterator[None]:
        """All parameters and their state are replaced in this block; if it fails, they belong to two states.

        Raises:
            IterationError: an update was lost before.
        """
        if self._runtime.failure.error is not None:
            self.check()
        with self._mixed(what, "failed half-way", _LOAD_ANOTHER):
            yield

    @contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """The whole state is replaced in this block by a checkpoint; what was lost before is forgotten."""
        with self._mixed(what, "failed half-way", _LOAD_ANOTHER):
            yield
        self._runtime.failure.error = None

    @contextmanager
    def restoring(self, what: str) -> Iterator[None]:
        """The whole state is replaced in this block by one that was committed; what was lost before is forgotten."""
        way_out = "try again when the cause is gone, or close this engine and resume in a new process"
        with self._mixed(what, "failed", way_out):
            yield
        self._runtime.failure.error = None

    @contextmanager
    def _mixed(self, what: str, how: str, way_out: str) -> Iterator[None]:
        self._reason = f"{what} has not finished"
        try:
            yield
        except BaseException as error:
            self._reason = f"{what} {how} ({type(error).__name__}: {error}); {way_out}"
            raise
        self._reason = None
