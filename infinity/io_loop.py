"""The I/O loop: one asyncio loop on its own thread, where the scheduler, residency and write-back live.

Policy only: no system calls on files and no kernels run here. The training thread hands it messages with `post` (no
answer) and coroutines with `submit` (a ticket).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from infinity.ending import end_executor
from storage.errors import ClosedError
from storage.types import Ticket

_log = logging.getLogger(__name__)
_JOIN_TIMEOUT_S = 10.0


class IoLoop:
    """Owns the loop and its thread; `close()` stops both.

    Args:
        on_failure: told, on the loop, about exceptions that no ticket carries: those of messages, above all.
    """

    def __init__(
        self, name: str = "infinity-io-loop", *, on_failure: Callable[[BaseException], None] | None = None
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._on_failure = on_failure
        self._loop.set_exception_handler(self._failed)
        self._executor = ThreadPoolExecutor(thread_name_prefix="infinity-io-executor")  # starts threads when used
        self._loop.set_default_executor(self._executor)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._messages: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._is_woken = False  # a wake-up is on its way, and finds what has been posted by then
        self._cpu_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stopped = threading.Event()
        self._closed = False
        self._closing = threading.RLock()  # nothing is handed over behind the end; finalizers may post while posting
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def cpu_s(self) -> float:
        """CPU time of the thread, as it was at the last message."""
        return self._cpu_s

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Run `function` on the loop soon. Messages run in the order they were posted.

        Raises:
            ClosedError: the loop is closed.
        """
        with self._closing:
            if self._closed:
                raise ClosedError("the I/O loop is closed: its engine has been closed")
            # Waking a loop is a system call, in which the caller gives up the interpreter's lock: once for all that
            # is posted before the loop comes to it.
            self._messages.append((function, args))
            if not self._is_woken:
                try:
                    self._is_woken = True
                    self._loop.call_soon_threadsafe(self._run_messages)
                except BaseException:  # Ctrl-C: the next message wakes the loop, at worst once too often
                    self._is_woken = False
                    raise

    def submit(self, coroutine: Coroutine[Any, Any, Any], label: str) -> Ticket:
        """Run a coroutine on the loop; the ticket completes with it and carries its exception.

        Raises:
            ClosedError: the loop is closed.
        """
        ticket = Ticket(label)
        try:
            self.post(self._start, coroutine, ticket)
        except ClosedError as error:
            coroutine.close()
            raise ClosedError(f"{label}: {error}") from None
        return ticket

    def close(self) -> None:
        """Run what was posted, cancel what still runs then, stop the loop, join the thread. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._stopped.wait(_JOIN_TIMEOUT_S):
            self._thread.join(2 * _JOIN_TIMEOUT_S)  # its own wait for what it cancels is bounded
        if self._thread.is_alive():
            _log.error("%s has not ended within %g s and is left behind", self._thread.name, _JOIN_TIMEOUT_S)
            return
        # Not by asyncio's own way, which waits forever in Python 3.11.
        end_executor(self._executor, f"work of {self._thread.name}", _JOIN_TIMEOUT_S)
        self._loop.close()

    def _run_messages(self) -> None:
        self._is_woken = False  # before the first message is taken: what comes from now on wakes the loop again
        self._cpu_s = time.thread_time()
        while self._messages:
            function, args = self._messages.popleft()
            try:
                function(*args)
            except Exception as error:
                self._loop.call_exception_handler({"message": f"message {function!r} failed", "exception": error})

    def _start(self, coroutine: Coroutine[Any, Any, Any], ticket: Ticket) -> None:
        task = self._loop.create_task(complete(coroutine, ticket))
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self._ended(ended, coroutine, ticket))

    def _ended(self, task: asyncio.Task[Any], coroutine: Coroutine[Any, Any, Any], ticket: Ticket) -> None:
        self._tasks.discard(task)
        if not ticket.done:  # cancelled before its first step: not even `complete` has run
            coroutine.close()
            ticket.set_exception(_cancelled(ticket))

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self._on_failure is not None and isinstance(error, Exception):
            self._on_failure(error)
        loop.default_exception_handler(context)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._stopped.set()
        self._cancel_all()  # here: the thread that closes may be running a loop of its own, as that of a notebook is

    def _cancel_all(self) -> None:
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        if pending:
            ended, left = self._loop.run_until_complete(asyncio.wait(pending, timeout=_JOIN_TIMEOUT_S))
            for task in ended:
                if not task.cancelled():
                    task.exception()  # who waits for it has been told
            if left:
                _log.error("%d tasks of %s do not end and are left behind", len(left), self._thread.name)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())


async def complete(coroutine: Coroutine[Any, Any, Any], ticket: Ticket) -> None:
    """Await a coroutine and complete the ticket with its outcome."""
    try:
        await coroutine
    except asyncio.CancelledError as error:
        ticket.set_exception(_cancelled(ticket))
        raise error
    except BaseException as error:
        ticket.set_exception(error)
    else:
        ticket.set_done()


def _cancelled(ticket: Ticket) -> Exception:
    return ClosedError(f"{ticket.label} was cancelled because its engine closed")
