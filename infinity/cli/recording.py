"""The folder of `--record` while its run goes on: what is known is there from the start, so that a run that fails or is
killed has a page too. The end of a run that succeeds replaces it.

    RUNNING, before the model is offloaded ──begin──▶ RUNNING ──keep──▶ RUNNING, with all steps measured
    RUNNING ──fail──▶ FAILED, or by Ctrl-C and SIGTERM INTERRUPTED
       └────finish──▶ FINISHED
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
        json: the file of the whole result: that of the folder, or of `--json`; None where none is asked for.
    """

    def __init__(self, folder: Path | None, json: Path | None) -> None:
        self._folder = folder
        self._json = json
        self._begun: dict[str, Any] | None = None
        self._kept: Mapping[str, Any] | None = None

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

    def keep(self, report: Mapping[str, Any]) -> None:
        """All steps are over, and their trace is written: whatever fails from now on, `report` is what they gave."""
        self._kept, self._begun = report, None

    def finish(self, report: Mapping[str, Any]) -> None:
        """Write the whole result.

        Raises:
            ConfigError: it cannot be written.
        """
        write_json(self._json, report)
        self._kept = None

    def fail(self, error: BaseException, trace: Trace | None = None, wear: Sequence[WearReport] = ()) -> None:
        """Write why the run ended, what it wrote to its drives, and its trace.

        What goes wrong with that is logged: the error matters more. The first call counts.

        Args:
            trace: None where the run ended before there was one.
        """
        begun, self._begun = self._begun, None
        kept, self._kept = self._kept, None
        try:
            if kept is not None:
                write_json(self._json, {**kept, **how_it_ended(error)})
            elif self._folder is not None and begun is not None:
                if trace is not None:
                    trace.write_chrome(self._folder / TRACE_FILE)
                wear_report = [one.to_json() for one in wear]
                write_json(self._folder / RUN_FILE, begun | {"wear": wear_report} | how_it_ended(error))
        except (OSError, ConfigError) as broken:
            _log.warning("the record of the failed run in %s is not complete: %s", self._folder or self._json, broken)
