"""The folder of `--record` while its run goes on: what is known is there from the start, so that a run that fails or is
killed has a page too. The end of a run that succeeds replaces it.

    RUNNING, before the model is offloaded ──begin──▶ RUNNING
    RUNNING ──fail──▶ FAILED, or by Ctrl-C and SIGTERM INTERRUPTED
       └──(`train` writes the whole result)──▶ FINISHED
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infinity.cli.files import make_folder, write_json
from infinity.errors import ConfigError
from infinity.observe.trace import Trace
from infinity.plan.wear_guard import WearReport
from infinity.report.ending import how_it_ended
from infinity.report.record import METRICS_FILE, RUN_FILE, TRACE_FILE, RunState

_log = logging.getLogger(__name__)


class Recording:
    """Keeps the folder up to date. Used by the training thread.

    Args:
        folder: None where nothing is recorded.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._begun: dict[str, Any] | None = None

    def open(self, opened: Mapping[str, Any]) -> None:
        """Make the folder, and write what is known before the model is offloaded.

        Steps of an earlier run stay until this one begins: a run that is refused or stopped before loses nothing.

        Raises:
            ConfigError: it cannot be made or written.
        """
        if self._folder is None:
            return
        make_folder("--record", self._folder)
        if not (self._folder / METRICS_FILE).exists():
            self._begun = dict(opened)
            write_json(self._folder / RUN_FILE, self._begun)

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

    def fail(self, error: BaseException, trace: Trace | None = None, wear: Sequence[WearReport] = ()) -> None:
        """Write why the run ended, what it wrote to its drives, and its trace.

        What goes wrong with that is logged: the error matters more. The first call counts.

        Args:
            trace: None where the run ended before there was one.
        """
        if self._folder is None or self._begun is None:
            return
        begun, self._begun = self._begun, None
        failed = begun | {"wear": [one.to_json() for one in wear]} | how_it_ended(error)
        try:
            if trace is not None:
                trace.write_chrome(self._folder / TRACE_FILE)
            write_json(self._folder / RUN_FILE, failed)
        except (OSError, ConfigError) as broken:
            _log.warning("the record of the failed run in %s is not complete: %s", self._folder, broken)
