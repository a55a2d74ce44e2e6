"""The folder of `--record` while its run goes on: what is known is there from the start, so that a run that fails or is
killed has a page too. The end of a run that succeeds replaces it.

    RUNNING ──fail──▶ FAILED
       └──(`train` writes the whole result)──▶ FINISHED
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinity.cli.files import write_json
from infinity.cli.stopping import Terminated
from infinity.errors import ConfigError
from infinity.observe.shortages import report_of
from infinity.observe.trace import Trace
from infinity.report.record import RUN_FILE, TRACE_FILE, RunState

_log = logging.getLogger(__name__)


class Recording:
    """Keeps the folder up to date. Used by the training thread.

    Args:
        folder: None where nothing is recorded.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._begun: dict[str, Any] | None = None

    def begin(self, begun: Mapping[str, Any]) -> None:
        """Write what is known before the first step; what an earlier run left there goes.

        Raises:
            ConfigError: it cannot be written.
        """
        if self._folder is not None:
            try:
                (self._folder / TRACE_FILE).unlink(missing_ok=True)
            except OSError as error:
                raise ConfigError(f"--record {self._folder}: cannot be written: {error.strerror or error}") from error
            self._begun = {**begun, "state": RunState.RUNNING.value}
            write_json(self._folder / RUN_FILE, self._begun)

    def fail(self, error: BaseException, trace: Trace) -> None:
        """Write why the run ended, and its trace. What goes wrong with that is logged: the error matters more."""
        if self._folder is None or self._begun is None:
            return
        failed = self._begun | {"state": RunState.FAILED.value, "error": _describe(error)}
        try:
            trace.write_chrome(self._folder / TRACE_FILE)
            write_json(self._folder / RUN_FILE, failed)
        except (OSError, ConfigError) as broken:
            _log.warning("the record of the failed run in %s is not complete: %s", self._folder, broken)


def _describe(error: BaseException) -> dict[str, str | None]:
    if isinstance(error, KeyboardInterrupt):
        message = "stopped by SIGTERM" if isinstance(error, Terminated) else "stopped by Ctrl-C"
        return {"type": type(error).__name__, "message": message, "report": None}
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    message = "\ncaused by ".join(f"{type(one).__name__}: {one}" for one in causes)
    report = next((found for one in causes if (found := report_of(one)) is not None), None)
    return {"type": type(error).__name__, "message": message, "report": report}
