"""Log messages of a command on standard error."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from infinity.cli.logs import shown_logs


class _Closed(io.StringIO):
    """What a pipe is that nobody reads any more."""

    def write(self, _: str) -> int:
        raise BrokenPipeError("nobody reads")


def test_warnings_are_notes_and_with_debug_everything_from_info_on(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("storage.test")
    with shown_logs(debug=False):
        log.info("quiet")
        log.warning("mind")
    with shown_logs(debug=True):
        log.info("told")
    log.info("after")
    assert capsys.readouterr().err == "note: mind\nINFO storage.test: told\n"


def test_a_message_that_cannot_be_shown_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be logged by a thread that moves bytes."""
    monkeypatch.setattr(sys, "stderr", _Closed())
    with shown_logs(debug=False):
        logging.getLogger("infinity.test").warning("mind")
