"""Stopping a run in the middle: a clean message, the right exit code, nothing left on disk."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infinity.cli.stopping import Terminated, deferred, stoppable, undisturbed
from infinity.report.page import page
from infinity.report.record import RunRecord, RunState
from tests.cli.command import TIMEOUT_S, start

MANY = ("--steps", "100000")


def _start_and_wait(folder: Path, beginning: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A run that has printed a line with this beginning."""
    process = start("train", "--preset", "tiny", "--nvme", folder, *MANY, *arguments)
    seen = ""
    assert process.stdout is not None
    for line in process.stdout:
        seen += line
        if line.startswith(beginning):
            return process, seen
    process.kill()
    _, error = process.communicate()
    raise AssertionError(f"the run ended before {beginning!r}:\n{seen}\n{error}")


def _ended_with(code: int, process: subprocess.Popen[str]) -> str:
    """Wait for the end of a run that was told to stop; what it wrote to the error stream."""
    try:
        _, error = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == code, error
    return error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "arguments"),
    [
        pytest.param(signal.SIGINT, 130, (), id="ctrl-c"),
        pytest.param(signal.SIGINT, 130, ("--clip", "1", "--accumulate", "2"), id="ctrl-c, synchronous"),
        pytest.param(signal.SIGTERM, 143, (), id="terminated"),
    ],
)
def test_stops_clean_in_the_middle_of_a_step(
    tmp_path: Path, number: signal.Signals, code: int, arguments: tuple[str, ...]
) -> None:
    process, _ = _start_and_wait(tmp_path, "step 2", *arguments)
    assert list(tmp_path.iterdir()) != []
    process.send_signal(number)
    error = _ended_with(code, process)
    assert "stopped" in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_that_is_stopped_while_it_is_compared_keeps_what_it_measured(tmp_path: Path) -> None:
    record, swap = tmp_path / "run", tmp_path / "swap"
    swap.mkdir()
    options = ("--steps", "3", "--baseline", "--record", str(record))
    process, _ = _start_and_wait(swap, "running the same training in plain PyTorch", *options)
    process.send_signal(signal.SIGINT)
    _ended_with(130, process)
    kept = RunRecord.load(record)
    assert kept.state is RunState.INTERRUPTED
    assert (len(kept.run["losses"]), len(kept.run["traffic"]["per_step"]), kept.run["baseline"]) == (3, 3, None)
    assert kept.run["prediction"].keys() and kept.spans
    assert "Interrupted after 3 steps" in page(kept)
    assert list(swap.iterdir()) == []


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_break_the_stop(tmp_path: Path) -> None:
    process, _ = _start_and_wait(tmp_path, "step 1")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _ended_with(130, process)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_libraries_load_waits_for_them(number: signal.Signals) -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt) as stop, deferred():
        steps.append("begun")
        signal.raise_signal(number)
        steps.append("loaded")
    assert steps == ["begun", "loaded"]
    assert isinstance(stop.value, Terminated) == (number == signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_while_libraries_load_is_shown_as_itself() -> None:
    with pytest.raises(ImportError), deferred():
        raise ImportError("torch")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_signal_stays_ignored_while_libraries_load() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


class _Watched:
    """Something to look at with a weak reference."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_that_python_drops_stops_all_the_same(number: signal.Signals) -> None:
    watched = _Watched()
    reference = weakref.ref(watched, lambda _: signal.raise_signal(number))
    hook, alarm = sys.unraisablehook, signal.getsignal(signal.SIGALRM)
    with pytest.raises(KeyboardInterrupt) as stop, stoppable():
        del watched  # the callback raises, and nobody gets to see it
        threading.Event().wait(5.0)
    assert reference() is None
    assert isinstance(stop.value, Terminated) == (number == signal.SIGTERM)
    assert (sys.unraisablehook, signal.getsignal(signal.SIGALRM)) == (hook, alarm)


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Writes the module `interrupted`, which can be imported once."""

    def write(text: str) -> None:
        (tmp_path / "interrupted.py").write_text(text)
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    sys.modules.pop("interrupted", None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_during_an_import_waits_for_its_end(importable: Callable[[str], None], number: signal.Signals) -> None:
    """Extension modules may swallow what is raised while they are initialised, as this module does."""
    importable(
        f"import signal, time\ntry:\n    signal.raise_signal({int(number)})\nexcept KeyboardInterrupt:\n    pass\n"
        "time.sleep(0.1)\nis_loaded = True\n"
    )
    with pytest.raises(KeyboardInterrupt) as stop, stoppable():
        loaded = importlib.import_module("interrupted")
        threading.Event().wait(5.0)
    assert loaded.is_loaded
    assert isinstance(stop.value, Terminated) == (number == signal.SIGTERM)


def test_a_second_stop_ends_an_import_that_does_not_end(importable: Callable[[str], None]) -> None:
    stop_s = f"import signal\nsignal.raise_signal({int(signal.SIGINT)})\n"
    importable(f"{stop_s}{stop_s}raise AssertionError('it went on')\n")
    with pytest.raises(KeyboardInterrupt), stoppable():
        importlib.import_module("interrupted")


def test_a_stop_that_was_dropped_does_not_disturb_closing() -> None:
    watched = _Watched()
    reference = weakref.ref(watched, lambda _: signal.raise_signal(signal.SIGINT))
    with stoppable():
        del watched
        with undisturbed():
            threading.Event().wait(0.1)  # it is asked for again meanwhile, and ignored
    assert reference() is None


def test_other_errors_that_nobody_can_catch_are_shown_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: shown.append(unraisable.exc_type))

    def fail(_: object) -> None:
        raise ValueError("in a callback")

    watched = _Watched()
    reference = weakref.ref(watched, fail)
    with stoppable():
        del watched
    assert reference() is None
    assert shown == [ValueError]
